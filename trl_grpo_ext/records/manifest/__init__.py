"""Which plugins a run used: recorded beside it and in every checkpoint, compared when a run is resumed.

    output_dir/trl_grpo_ext_plugins.json                     when the training starts
    output_dir/checkpoint-N/trl_grpo_ext_plugins.json        with every checkpoint, and wherever a model is saved
    output_dir/README.md                                     a table, in the model card
    output_dir/trl_grpo_ext_settings.json                    the hyper-parameters, when the training starts

`source` hashes what a plugin is written in, `records` has the manifest, `comparison` says how two of them differ,
`model_card` makes the table, `settings` has the hyper-parameters, and `training` is the part of the trainer that does
all this.
"""

from .comparison import differences, version_notes
from .records import FILE, Manifest, PluginRecord

__all__ = ["FILE", "Manifest", "PluginRecord", "differences", "version_notes"]
