"""The adapter overrides each method of TRL in one place, and its table says which."""

import re

from trl import GRPOTrainer

from trl_grpo_ext.trainer import mixin, upstream
from trl_grpo_ext.trainer.batch import BatchKeys
from trl_grpo_ext.trainer.mixin import GRPOExtMixin, GRPOExtTrainer


def test_the_table_of_the_adapter_is_what_it_overrides() -> None:
    assert GRPOExtMixin.__mro__ == (GRPOExtMixin, object)
    assert not {name for name in vars(GRPOExtTrainer) if not name.startswith("__")}
    overridden = {
        name for name in vars(GRPOExtMixin) if hasattr(GRPOTrainer, name) and callable(vars(GRPOExtMixin)[name])
    }
    overridden -= {"__init_subclass__"}  # of every class, not TRL's
    rows = [row.split("|")[1] for row in (mixin.__doc__ or "").splitlines() if row.startswith("| `")]
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == overridden
    assert overridden - {"__init__"} == upstream.METHODS.keys() - upstream.CALLED


def test_every_key_of_ours_says_whose_it_is() -> None:
    keys = [value for name, value in vars(BatchKeys).items() if not name.startswith("__")]
    assert len(set(keys)) == len(keys) >= 8
    assert all(key.startswith("trl_grpo_ext_") for key in keys)
