"""The page on finding the scale: the recipe leaves the promised headroom, and the table has the recorded figures."""

import json

import jax.numpy as jnp
import pytest

import jmpscale

import pages

pytestmark = pytest.mark.once

PAGE = "finding_the_scale"
SPIKES = "text, spikes, from 2^16"
HEADING = "A start from one batch"
FIGURES = json.loads((pages.DOCS.parent / "benchmarks" / "results" / "calibration.json").read_text())["replayed"]


@pytest.fixture(scope="module")
def calibrated():
    return pages.run(PAGE, HEADING)["calibrated"]


@pytest.mark.parametrize("size", [1e-6, 1.0, 300.0])
@pytest.mark.parametrize("headroom", [0, 2, 5])
def test_the_largest_gradient_has_the_requested_headroom(calibrated, size, headroom):
    scaler = calibrated(lambda w: jnp.sum(w * size), jnp.ones(3), headroom=headroom, max_scale=2.0**40)
    assert 65504 / 2 ** (headroom + 1) < float(scaler.loss_scale) * size <= 65504 / 2**headroom


def test_settings_and_limits_are_respected(calibrated):
    scaler = calibrated(lambda w: jnp.sum(w), jnp.ones(3), growth_interval=7, max_scale=16.0)
    assert scaler.loss_scale == 16.0
    assert scaler.config == jmpscale.ScalerConfig(growth_interval=7, max_scale=16.0)


@pytest.mark.parametrize("factor", [0.0, jnp.inf])
def test_a_batch_without_a_largest_gradient_is_refused(calibrated, factor):
    with pytest.raises(ValueError, match="the largest gradient of this batch is"):
        calibrated(lambda w: jnp.sum(w * factor), jnp.ones(3))


def test_the_table_has_the_recorded_figures():
    rows = [line.split("|")[1:-1] for line in (pages.DOCS / f"{PAGE}.md").read_text().splitlines() if line[:3] == "| `"]
    assert len(rows) >= 5
    for name, *cells in rows:
        rule = name.strip(" `")
        photo, text, spikes = (FIGURES[run][rule] for run in ("photo, from 2^16", "text, from 2^32", SPIKES))
        after = FIGURES["text, collapse, from 2^16"][rule]["right again after step 4030"]
        expected = [str(figures["skipped"]) for figures in (photo, text, spikes)]
        expected += [f"{photo['lost']:.2%}", str(after) if after < 10_000 else "never"]
        assert [cell.strip() for cell in cells] == expected, rule
