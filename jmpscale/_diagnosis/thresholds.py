"""The tuned numbers of a diagnosis, each with its reason."""

# --- Whether a scale fits. Errors are relative L2 norms. ---

# The largest error of a gradient at a scale that fits. The error in float16 is 16% in 33 convolutions with batch
# normalization, 0.2% in transformers and recurrences of any depth, and 23% in a Fourier feature with rounded phases.
LARGEST_ERROR = 0.2
# From this error on, each line is run alone, and the summary names the worst line and gradient. The healthy programs of
# the tests stay below it. It does not require a change: two public programs with 7% and 9% train as well as in float32.
LARGE_ERROR = 0.05
# A scale fits if no error exceeds the error at the best scale, times the factor, by more than the tolerance. Without
# them, the other digits that float16 rounds at another scale would decide.
FACTOR, TOLERANCE = 1.1, 0.01
# The largest error of the loss. The healthy programs of the tests have at most 2%.
LARGEST_LOSS_ERROR = 0.03

# --- Which gradients decide. ---

# The relative change of a gradient that is rounding noise in float32, if the arguments change in the last places. It is
# 23% to 78% for the bias of a convolution before batch normalization, and 0.2% for a second derivative.
NOISE, ULP = 0.1, 2.0**-22
# The norm of a gradient, relative to the largest norm, below which it decides nothing. Two losses so different in size
# that no scale fits both have gradients of 2^-44; behind a saturated softmax, where float16 gives zero, it is 2^-74.
NEGLIGIBLE = 2.0**-60
# The relative change of the arguments by which an error of numbers near zero is recognized: large beside the distance
# from a minimum at the end of training, and small beside the arguments.
CHANGE = 0.1

# --- The update. Errors are relative L2 norms of the change of a leaf of the state. ---

# The largest error of the change of a leaf that is stored in half precision, which rounds in each step. Of 22 training
# runs, it marks 11 of 12 that end more than 5% worse than in float32, and 4 of 10 others, which end 1% to 4% worse.
LARGEST_NARROW_CHANGE_ERROR = 0.5
# The largest error of the change of a float32 leaf, and of another result: healthy steps have at most 11%, and faulty
# ones at least 33%.
LARGEST_CHANGE_ERROR = 0.2
# A change that is smaller, relative to the leaf, is mostly rounding in float32, too.
NOISE_OF_CHANGE = 2.0**-21

# The part of a change from which on the summary says that it is lost.
LOST = 0.5

# --- How long a search takes. ---

LARGEST_SET = 12  # lines that are found one by one, each in about log2(n) runs of a program of n lines
TRIED_ALONE = 64  # parts of which each one is run alone, more than the rows of a table by default
MOST_CALLS = 3  # calls of a line that are named, each found in about log2(n) runs: of more, the line is the cause

# --- Which scaler is named. ---

# Bits below the largest scale that fits, so that larger gradients in later batches still fit. Of 13 programs whose
# first scale was too large, two skipped another two or three steps from this one.
MARGIN = 2
# Bits below the largest scale for the first steps: the gradients of a face recognizer grow by 5 bits in 12 steps.
ROOM = 6
DEFAULT = 16  # the exponent of the scale of `dynamic()`
