"""The tuned numbers of a diagnosis, each with its reason. Errors are relative L2 norms.

Two questions are kept apart. A loss scale fits if it is nearly as good as the best one, however large the error of
rounding is. The error at the best scale is rounding, and it is small, moderate or wrong.
"""

from typing import NamedTuple

# --- Rounding: how large the error of a gradient is at the best scale; `benchmarks.studies.rounding` has a record. ---

# Below, there is nothing to say: with an error of 0.9%, a network of time steps trains as in float32.
SMALL_ERROR = 0.05
# Above, the gradient is wrong, and a minimal set of lines must compute in float32. A moderate error, between the two
# limits, does not show whether training suffers: with an error of 19%, a residual network with small batches trains as
# in float32, whereas rounded time steps, with 21%, make the loss 9,000 times as large.
WRONG_ERROR = 0.5
# The largest error of the loss. The healthy programs of the tests have at most 2%.
LARGEST_LOSS_ERROR = 0.03

# --- What enters in half precision: an input that moves within its last place, in float32, is tried like an error. ---

# The gradients change by 99% for the table of a noise schedule in bfloat16, 11% for time steps up to 999, and less than
# 0.1% for images and for a table of cosines. These are 400, 50 and less than 1 times the change that parameters make
# that move as much. In healthy steps near a minimum of the loss, or with low-rank adapters, it is at most 8 times.
BESIDE_PARAMETERS = 10.0

# A probability of a threshold is a number of steps, one for each different random number in half precision. Up to so
# many steps, it may have an error of a third. bfloat16 has 128 of them, so the probability 0.9 is 0.902, but 0.01 is
# 0.0156.
RARE = 3

# The fraction of indices that differ from float32 from which on they are wrong. It is 66% for positions by a cumulative
# sum in bfloat16, 43% for 1,000 codes, and 8% for coordinates in an image of 64 rows, of which rounding moves some into
# the next row: interpolation makes up for that.
DIFFERENT_INDICES = 0.1

# --- Loss scales: how much larger an error may be than the smallest one at any scale. ---

# An error may exceed the smallest one by a factor and a tolerance. Without them, the other digits that float16 rounds
# at another scale would decide.
FACTOR, TOLERANCE = 1.1, 0.01
# If errors are large, they are noise: by chance, one gradient may be more accurate at one scale. So each error may also
# be larger by this fraction of the largest one at the best scale.
NOISE_OF_ERRORS = 0.25

# The exponents of a smaller and a larger scale at which float32 must have the same gradients as at 1. A backward pass
# that clips has them at the smaller scale; if they differ at both, values are out of the range of float32.
OTHER_SCALES = -12, 12

# --- Causes. ---

# Causes whose errors are within this factor of the largest one are in program order, because an error of a first line
# makes the next ones wrong, too. An overflow or underflow is the reason of an error that the range of float32 divides
# by at least this factor.
SAME_SIZE = 2.0
# The part of an error that may remain after a remedy: with more, the cause is another one, too.
REMAINS = 1 / 3
# The most lines that are named for a moderate error: of more, the worst one.
MOST_SUSPECTS = 3

# --- Which gradients decide. ---

# The relative change of a gradient that is rounding noise in float32, if the arguments change in the last places. It is
# 23% to 78% for the bias of a convolution before batch normalization, and 0.2% for a second derivative.
NOISE = 0.1
# The changes of the arguments. A sum that is zero but for its last digit has few possible values, so after one change
# it may be the same by chance.
CHANGES = 2.0**-22, -(2.0**-22), 2.0**-20, -(2.0**-20)
# The norm of a gradient, relative to the largest norm, below which it decides nothing. Two losses so different in size
# that no scale fits both have gradients of 2^-44; behind a saturated softmax, where float16 gives zero, it is 2^-74.
NEGLIGIBLE = 2.0**-60
# The relative change of the parameters that shows whether gradients are small only because the loss is near a minimum:
# large beside the distance from it, and small beside the parameters. `benchmarks.studies.healthy_steps` has a record.
CHANGE = 0.1

# The most slices of an array along its first axis that are compared by themselves: layers, experts, or members.
MOST_SLICES = 128

# --- The update. Errors are relative L2 norms of the change of a leaf of the state. ---

# The largest error of the change of a leaf that is stored in half precision, which rounds in each step. Of 22 training
# runs, it marks 11 of 12 that end more than 5% worse than in float32, and 4 of 10 others, which end 1% to 4% worse.
LARGEST_NARROW_CHANGE_ERROR = 0.5
# The largest error of the change of a float32 leaf, and of another result: healthy steps have at most 11%, and faulty
# ones at least 33%. Metrics that are counts or small differences, such as the clipped fraction of a right step of PPO,
# have up to 11%, too (`benchmarks.studies.healthy_steps`).
LARGEST_CHANGE_ERROR = 0.2


class AcceptedErrors(NamedTuple):
    """The largest errors that are accepted: those above, or one number that the user has chosen for all of them."""

    small: float = SMALL_ERROR  # of a gradient, below which there is nothing to say
    gradient: float = WRONG_ERROR
    loss: float = LARGEST_LOSS_ERROR
    narrow_change: float = LARGEST_NARROW_CHANGE_ERROR  # of a leaf that is stored in half precision
    change: float = LARGEST_CHANGE_ERROR
    is_chosen: bool = False


# A change that is smaller, relative to the leaf, is mostly rounding in float32, too.
NOISE_OF_CHANGE = 2.0**-21

# The error of a change, in units of the largest one that is accepted, above which the lines of the update are tried
# alone, for the rows of the table.
ALMOST_BAD = 0.25

# The part of a change from which on the summary says that it is lost.
LOST = 0.5

# The errors of two leaves cancel if their sum is below this fraction of each: it is 0.2% in Kahan summation, whereas
# errors of parameters and their momentum in bfloat16 are independent.
CANCELS = 0.25
# A change is rounded at random if the mean of the errors of so many draws is below this fraction of the error of one
# draw: it is 35% then, and 100% of a change that is always lost. So is the part of the changes that is missing on
# average, or it is below so many of its standard errors.
DRAWS, IS_RANDOM, STANDARD_ERRORS = 8, 0.5, 3.0

# A leaf in half precision whose new value is its old one, times a decay, plus something else, such as a moving average,
# never shrinks if 1 - decay is below this part of the distance from 1 to the next number of its dtype: relative to
# them, the distance between two numbers is at least half of it, and rounding loses half.
STALLED = 0.25
# A constant that is nearer to 1 may be a decay, which rounding to half precision may have changed to 1.
NEAR_ONE = 0.01
# The value of a leaf at which its decay is measured. In float32, a difference of numbers of this size shows a decay to
# `SMALLEST_DECAY`; a smaller one is 1.
LARGE_VALUE, SMALLEST_DECAY = 2.0**10, 1e-6

# The relative distance of an average from what it averages at which its changes must not be rounded away. With a decay
# of 0.99, an average in bfloat16 of parameters stays 20% away from them, and with 0.9 2%.
FAR_FROM_AVERAGED = 0.2

# The relative change of all else that an update reads. An average that has reached what it averages, and so hardly
# changes, changes then; a number that does not change is a constant of the step, such as an increment.
OTHER_VALUES = 0.1

# The factor of gradients that change a leaf, if any do: a leaf that does not change then does not change in this step.
LARGE_GRADIENT = 2.0**10

# --- How long a search takes. ---

LARGEST_SET = 12  # lines that are found one by one, each in about log2(n) runs of a program of n lines
TRIED_ALONE = 64  # parts of which each one is run alone, more than the rows of a table by default
SAMPLES = 1024  # of the indices that one operation makes
MOST_INPUTS = 4  # that are too coarse, each found in about log2(n) runs
# Casts or layers of a line that are named, each found in about log2(n) runs: of more, the line is the cause.
MOST_NAMED = 3

# --- Which scaler is advised. ---

# Bits below the largest scale that fits, so that larger gradients in later batches still fit.
MARGIN = 2
# Bits below the largest scale for the first steps, in which gradients grow, and for a static scale, which cannot back
# off.
ROOM = 6
DEFAULT = 16  # the exponent of the scale of `dynamic()`
