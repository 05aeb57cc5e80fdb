def length(completions, **columns):
    return [float(len(text)) for text in completions]
