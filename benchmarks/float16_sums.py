"""Measures the error of a sum over devices in float16: `python -m benchmarks.float16_sums`.

The sum is simulated, one device after the other, as in a ring all-reduce. The gradient of each device is the mean
gradient, alone or with noise of ten times its norm. The error is relative to the sum of the same float16 gradients in
float64, in the L2 norm over all parameters.
"""

import numpy as np

from benchmarks import record

RESULTS = record.RESULTS / "float16_sums.json"
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
    """Prints and writes the errors for each number of devices."""
    random, figures = np.random.default_rng(0), {}
    for devices in DEVICES:
        equal, noisy = (round(float(error(devices, noise, random)), 5) for noise in (0.0, NOISE))
        figures[devices] = {"equal": equal, "noisy": noisy}
        print(f"{devices} devices: {equal:.1%} if the gradients are equal, {noisy:.2%} with noise")
    record.add(RESULTS, {"about": record.about("benchmarks.float16_sums", "cpu"), "figures": figures})


if __name__ == "__main__":
    main()
