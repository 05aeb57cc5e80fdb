"""What token losses declare, tried on made-up numbers; their values are in `tests/token_losses`."""

import pytest
import torch

from tests.token_losses.made_up import random_batch, terms_of
from trl_grpo_ext.credit.token_losses import check_declarations
from trl_grpo_ext.errors import PluginOutputError
from trl_grpo_ext.types import LossTerms, TokenLossDeclaration


class Lies:
    """Declares what it is not."""

    __name__ = "lies"

    def __init__(self, what: str, **declared: bool) -> None:
        self.what, self.declares = what, TokenLossDeclaration(**declared)

    def loss(self, terms: LossTerms) -> torch.Tensor:
        if self.what == "mixes":
            return -terms.advantages_B_T * (terms.logps_B_T - terms.logps_B_T.mean())
        return terms.logps_B_T.square()


@pytest.mark.parametrize(("what", "wrong"), [("mixes", "rows_apart"), ("always", "vanishes")])
def test_check_declarations_refuses_what_is_false(what: str, wrong: str) -> None:
    loss = Lies(what)
    terms = terms_of(*random_batch(3, 4), loss)
    true = {"rows_apart": what == "always", "vanishes": False}
    check_declarations(loss, terms, **true)
    with pytest.raises(PluginOutputError, match="lies"):
        check_declarations(loss, terms, **{**true, wrong: True})
