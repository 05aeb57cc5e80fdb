a_number = 3


def a_function(advantages_B_T, rollout):
    return advantages_B_T


class Hook:
    def on_rollout(self, advantages_B_T, rollout):
        return advantages_B_T


class Both:
    def weights(self, rollout):
        return rollout.mask_B_T

    def reduce(self, loss_B_T, mask_B_T, totals):
        return loss_B_T.sum()
