"""The verbs of the command line, a file each: its flags, and what it calls in the library.

A verb's `execute` returns its JSON object and what is shown in its place without `--json`.
"""

from eagle3_jax.verbs.decode import Decode
from eagle3_jax.verbs.eval import Eval
from eagle3_jax.verbs.info import Info
from eagle3_jax.verbs.synth import Synth
from eagle3_jax.verbs.train import Train

VERBS: dict[str, type] = {
    "decode": Decode,
    "train": Train,
    "synth": Synth,
    "eval": Eval,
    "info": Info,
}
"""What `eagle3` can do."""
