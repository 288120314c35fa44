"""EAGLE-3's chain in numpy float64, one root at a time, written from the paper and no library.

The oracle of both learning and decoding: it shares no code with either.
"""

import numpy as np

from eagle3_jax.configs import DrafterConfig


def _norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def _rope(x: np.ndarray, position: int, theta: float) -> np.ndarray:
    """Rotate [h, hd] heads, half-split pairs."""
    half = x.shape[-1] // 2
    angle = position / theta ** (np.arange(half) / half)
    first, second = x[:, :half], x[:, half:]
    return np.concatenate(
        [
            first * np.cos(angle) - second * np.sin(angle),
            second * np.cos(angle) + first * np.sin(angle),
        ],
        axis=-1,
    )


class NaiveDrafter:
    """One root's chain, step by step.

    Args:
        arrays: the drafter's by dotted path.
        config: its configuration; default rope only.
        embedding: the verifier's table [v, d].
    """

    def __init__(self, arrays, config: DrafterConfig, embedding):
        self.w = {name: np.asarray(value, np.float64) for name, value in arrays.items()}
        self.c, self.embedding = config, np.asarray(embedding, np.float64)

    def _fuse(self, features: np.ndarray) -> np.ndarray:
        c, w, x = self.c, self.w, np.asarray(features, np.float64)
        if c.fc_norm:
            parts = x.reshape(c.num_features, c.verifier_width)
            x = _norm(parts, w["fc_norm.weight"], c.norm_eps).reshape(-1)
        if c.norm_before_fc:
            x = _norm(x, w["input_norm.weight"], c.norm_eps)
        return x @ w["fusion.kernel"]

    def _qkv(self, hidden: np.ndarray, token: int, position: int):
        c, w = self.c, self.w
        u = np.concatenate(
            [
                _norm(self.embedding[token], w["embedding_norm.weight"], c.norm_eps),
                _norm(hidden, w["hidden_norm.weight"], c.norm_eps),
            ]
        )
        x = u @ w["qkv.kernel"]
        q, k, v = np.split(
            x, [c.num_heads * c.head_width, (c.num_heads + c.num_kv_heads) * c.head_width]
        )
        q, k = q.reshape(c.num_heads, c.head_width), k.reshape(c.num_kv_heads, c.head_width)
        if c.qk_norm:
            q = _norm(q, w["q_norm.weight"], c.norm_eps)
            k = _norm(k, w["k_norm.weight"], c.norm_eps)
        theta = c.rope.theta
        q, k = _rope(q, position, theta), _rope(k, position, theta)
        return q, k, v.reshape(c.num_kv_heads, c.head_width)

    def _attend(self, hidden, q, keys, values) -> np.ndarray:
        c, w = self.c, self.w
        group = c.num_heads // c.num_kv_heads
        out = []
        for h in range(c.num_heads):
            scores = np.array([k[h // group] @ q[h] for k in keys]) * c.head_width**-0.5
            weights = np.exp(scores - scores.max())
            weights /= weights.sum()
            out.append(sum(a * v[h // group] for a, v in zip(weights, values, strict=True)))
        if c.norm_before_residual:
            hidden = _norm(hidden, w["hidden_norm.weight"], c.norm_eps)
        g = hidden + np.concatenate(out) @ w["o.kernel"]
        y = _norm(g, w["mlp_norm.weight"], c.norm_eps) @ w["mlp.gate_up.kernel"]
        gate, up = np.split(y, 2)
        g = g + (gate / (1 + np.exp(-gate)) * up) @ w["mlp.down.kernel"]
        return _norm(g, w["norm.weight"], c.norm_eps) if c.norm_output else g

    def _read_out(self, hidden: np.ndarray) -> np.ndarray:
        if not self.c.norm_output:
            hidden = _norm(hidden, self.w["norm.weight"], self.c.norm_eps)
        return hidden @ self.w["head.kernel"]

    def chain(self, features: np.ndarray, tokens, root: int, steps: int, greedy: bool = False):
        """Logits [steps, dv] of the chain below the row at position `root`, and its tokens.

        Args:
            features: true features [t, f].
            tokens: the text; the root's row is fed tokens[root + 1], step i tokens[root + 1 + i].
            root: position of the root's context row.
            steps: of the chain.
            greedy: feed the drafter's own choices from step 1 on, and not the text.
        """
        keys, values = [], []
        hidden = q = np.zeros(0)
        for position in range(root + 1):
            hidden = self._fuse(features[position])
            q, k, v = self._qkv(hidden, int(tokens[position + 1]), position)
            keys.append(k)
            values.append(v)
        hidden = self._attend(hidden, q, keys, values)
        logits, chosen = [self._read_out(hidden)], []
        for step in range(1, steps):
            own = int(self.w["vocabulary"][int(np.argmax(logits[-1]))])
            token = own if greedy else int(tokens[root + 1 + step])
            chosen.append(token)
            q, k, v = self._qkv(hidden, token, root + step)
            keys.append(k)
            values.append(v)
            hidden = self._attend(hidden, q, keys, values)
            logits.append(self._read_out(hidden))
        chosen.append(int(self.w["vocabulary"][int(np.argmax(logits[-1]))]))
        return np.stack(logits), chosen
