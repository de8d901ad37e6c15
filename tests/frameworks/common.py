"""The task of the tests of frameworks, and the lines that the guide for a framework adds to a user's program."""

import pathlib
import re

import numpy as np
import optax

GUIDES = pathlib.Path(__file__).parents[2] / "docs" / "guides"
VOCABULARY, LENGTH, BATCH = 32, 12, 16
WEIGHT = 2.0**-16  # of the loss: without loss scaling most gradients underflow in float16
EPSILON = 1e-8 * WEIGHT  # the default would hide such small gradients
OVERFLOW = 12  # the step, counted from 0, that overflows if a test requests it


def token_batches(count):
    """Returns batches in which each token is the one before it plus 3: i32[count, BATCH, LENGTH]."""
    starts = np.random.default_rng(0).integers(VOCABULARY, size=(count, BATCH, 1))
    return np.int32((starts + 3 * np.arange(LENGTH)) % VOCABULARY)


def next_token_losses(logits, tokens):
    """Returns the loss of each token but the first, from logits that were computed from all tokens but the last."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])


def adamw(learning_rate=3e-3):
    return optax.chain(optax.clip_by_global_norm(0.5 * WEIGHT), optax.adamw(learning_rate, eps=EPSILON))


def page_programs(page, section=""):
    """Returns the program after each of the changes that a guide shows, or a section of a guide."""
    text = (GUIDES / f"{page}.md").read_text()
    if section:
        text = re.split(r"^## ", text.partition(f"\n## {section}\n")[2], flags=re.MULTILINE)[0]
    changes = re.findall(r"^```diff\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    return ["".join(line[1:] for line in change.splitlines(True) if line[0] != "-") for change in changes]
