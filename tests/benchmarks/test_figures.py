"""The figures on the pages are those of the recorded results: tables, and numbers whose comment names a figure."""

import functools
import pathlib
import re
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

from benchmarks import cards, figures, record, steps, table


@functools.cache
def _results():
    return table.read_results()


@functools.cache
def _known():
    return figures.figures(_results())


@pytest.mark.parametrize("path", table.paths(), ids=lambda path: str(path.relative_to(record.ROOT)))
def test_tables_and_figures_equal_the_results(path):
    text = path.read_text()
    assert table.rewrite(text, table.pages(_results()).get(path, {}), _known()) == text


def test_rewrite_changes_a_figure_with_its_name_only():
    text = "It takes 1.5<!-- trace wrapper --> s, or 2.5 to 3<!-- diagnosis -->% of 4.5."
    known = {"trace wrapper": "7", "diagnosis": "8 to 9"}
    new = "It takes 7<!-- trace wrapper --> s, or 8 to 9<!-- diagnosis -->% of 4.5."
    assert figures.rewrite(text, known) == new
    with pytest.raises(ValueError, match="the page names the figure 'diagnosis'"):
        figures.rewrite(text, {"trace wrapper": "7"})


def test_costs_says_whether_a_device_was_measured():
    text = " ".join((table.DOCS / "costs.md").read_text().split())
    assert ("its time on a GPU has not been measured" in text) == (not cards.read())


def test_other_steps_need_at_most_the_memory_of_the_clipped_step():
    compiled = [_results()["compilers"][key]["figures"] for key in table.COMPILED.values()]
    names = {*figures.OURS, *steps.PEERS} - {"optax apply_if_finite"}
    assert all(x[name]["temp_bytes"] <= 1.0005 * x["clipped"]["temp_bytes"] for x in compiled for name in names)


def test_costs_has_no_other_figures():
    """Each decimal number in the prose of the page has a name."""
    text = (table.DOCS / "costs.md").read_text()
    text = re.sub(r"<!-- (\w+) -->.*?<!-- /\1 -->|^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    assert re.findall(r"\d+\.\d+", figures.FIGURE.sub("", text)) == ["1.0005"]  # a limit in a test


@pytest.mark.parametrize("name", table.FILES)
def test_results_have_a_record_of_each_run(name):
    results = _results()[name]
    for result in [results] if "about" in results else results.values():
        assert {"date", "command", "device", "versions"} <= set(result["about"])
        assert result["about"]["command"].startswith("python -m benchmarks")
