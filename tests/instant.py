"""The demonstration's training, in no time: for tests of all that is around it, in this process and in others."""

import numpy as np

import jmpscale
import jmpscale.__main__ as demo


def train(name, text, steps, whole, seed):
    """Returns at once what a training that learns nothing might."""
    history = {key: np.stack([value] * steps) for key, value in jmpscale.metrics(jmpscale.dynamic()).items()}
    history |= {"loss": np.full(steps, 2.5, np.float32), "zero": np.full(steps, 0.25, np.float32)}
    demo._show_progress(name, steps, steps)
    return demo.Outcome(history, 0.01, "as it is written", {"logits": np.full((2, 3), 2.0**-20, np.float32)})
