"""Words of messages that several tests expect, so that a changed word changes one place."""

# --- errors and warnings of the guards ---

NO_FUNCTION = "fun must be the loss function, got"
NO_FLAG = "finite must be a boolean, got"
NO_INTEGER = "must be a Python int, got"
NO_FLOAT = "must be a Python float, got"
NO_FLOATING_DTYPE = "dtype must be a floating-point dtype, got"
BETWEEN = "must be between"
SCALE_RANGE = "scale must be between 2^-126 and 2^126, got"
ONE_SCALER = "exactly one ScalerState, found"
NO_BATCH = "must hold one scaler, got"
NO_AXIS = "is not the name of"
ONLY_IN = "is only in its"
CONSTANT = "is a constant of the compiled program"
HALF_LOSS = "the loss is float16"
SCALED_TWICE = "the loss is scaled twice"
UNSCALED_TWICE = "the gradients are unscaled twice"
UPDATED_TWICE = "the scaler is updated twice"
NEVER_SCALED = "no loss has been scaled yet"
NEVER_UNSCALED = "a loss was scaled, but its gradients were not unscaled"
UNSCALED_BY_NEW = "the gradients are unscaled by the scaler that update has returned"

# --- sentences of a diagnosis ---

OVERFLOW = "The forward pass overflows: "
UNDERFLOW = "The forward pass underflows: "
NO_SCALE_FITS = "No loss scale fits. At "
GRADIENTS_DIFFER = "The gradients differ from float32 by "
LOSS_DIFFERS = "The loss differs from float32 by "
HALVED = (
    "all values halve if the loss scale doubles: they are unscaled, but not scaled. If a backward pass returns new "
    "values there, such as an amax, name their paths: value_and_grad(..., overwrite_with_gradient=...). If they are "
    "gradients, scale their loss, and multiply the constants of a custom backward pass by the loss scale."
)
IGNORED_SCALER = "No gradient depends on the dynamic loss scale: "
NO_GRADIENT = "All gradients are zero, in float32 too. "
NO_HALF_RESULT = "The program has no result in half precision"
REMEDY = "then the gradients differ from float32 by "
REMEDY_OF_ALL_LINES = "then the gradients have no result in half precision"
ROUNDING = "rounding, not range."
LARGEST_NUMBER = "and the largest number of float16 is 65504."
NO_SCALE_HELPS = "A loss scale cannot prevent that."
NORMALIZE = "Or normalize its input."
HALF_FORWARD = "With only the forward pass of "
TOO_SMALL = "It is too small: the gradients "
TOO_LARGE = "It is too large: the gradients "
PRECISE_MATMUL = 'in float32, with precision="highest" where autocast converts a matmul: '
