import tge_no_such_dependency  # noqa: F401


def reward(completions, **columns):
    return [0.0] * len(completions)
