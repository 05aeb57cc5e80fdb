import time

time.sleep(3)


def reward(completions, **columns):
    return [0.0] * len(completions)
