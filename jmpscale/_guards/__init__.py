"""Guards: what the functions of the algorithm require of a call, and the mistakes of which they warn.

Each module of the algorithm calls one module of guards, in one line for each event: a call, a value that was computed,
a result of the user's function. These functions return nothing, so no result depends on a guard: `pytest
--without-guards` removes them all. A module of guards has the name of the module that calls it. Checks that several
guards or tools share are in `checks.py`: `check_*` raises, and `warn_*` warns.

A guard knows values: their types, the structure of a tree, marks on arrays, and whether the call is inside `apply_if`.
"""
