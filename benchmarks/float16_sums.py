"""Measures the error of a sum over devices in float16: `python -m benchmarks.float16_sums`.

The sum is simulated, one device after the other, as the error of a ring. The gradient of each device is the mean
gradient, alone or with noise of ten times its norm. The error is relative to the sum of the same float16 gradients in
float64, in the L2 norm over all parameters.
"""

import numpy as np

DEVICES = (256, 1024, 4096)
PARAMETERS = 10_000
NOISE = 10.0  # times the mean gradient


def error(devices, noise, random):
    """Returns the relative error of the sum over devices."""
    mean = random.standard_normal(PARAMETERS)
    total, exact = np.zeros(PARAMETERS, np.float16), np.zeros(PARAMETERS)
    for _ in range(devices):
        gradient = (mean + noise * random.standard_normal(PARAMETERS)).astype(np.float16)
        total += gradient
        exact += gradient
    return np.linalg.norm(total - exact) / np.linalg.norm(exact)


def main():
    """Prints a row for each number of devices."""
    random = np.random.default_rng(0)
    print("devices  equal  noisy")
    for devices in DEVICES:
        equal, noisy = (error(devices, noise, random) for noise in (0.0, NOISE))
        print(f"{devices:7}  {equal:5.1%}  {noisy:5.2%}")


if __name__ == "__main__":
    main()
