"""Guards: what the functions of the algorithm require of a call, and the mistakes of which they warn.

Each module of the algorithm calls one module of guards, in one line for each event: a call, a value that was computed,
a result of the user's function. These functions return nothing, so no result depends on a guard: `pytest
--without-guards` removes them all. All other functions are for guards and tools: `check_*` raises, and `warn_*` warns.

A guard knows values: their types, the structure of a tree, marks on arrays, and whether the call is inside `apply_if`.
"""
