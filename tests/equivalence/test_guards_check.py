"""R-GUARD-1 in the main job: the reference names the same first fault of drawn batches, and every kind is drawn."""

from collections import Counter

from equivalence.checks.rows import guards
from equivalence.checks.rows.guards import check_guards
from equivalence.generators.choices import RandomChoices
from equivalence.generators.guards import draw_guards
from equivalence.mutants.patches import replaced
from production.rows import guards as production

KINDS = (
    *("mixed_rows", "missing_field", "field_shape", "field_dtype", "unequal_lengths", "cu_start", "cu_order", "cu_end"),
    *("max_seqlen", "context_parallel_size", "indivisible_segment", "global_batch_size", "data_parallel_size"),
    "target_mask",
)


def drawn(count=400):
    return [draw_guards(RandomChoices(0, place)) for place in range(count)]


def test_r_guard_1_both_sides_refuse_the_same_batches_and_every_kind_is_drawn():
    seen = Counter()
    for case in drawn():
        found = check_guards(case)
        assert found.findings == []
        seen[found.refused.split()[0] if found.refused else None] += 1
    assert set(seen) == {*KINDS, None}
    assert seen[None] > 20


def test_a_guard_of_the_first_row_alone_is_found():
    """Each of the guards below looks at one row too few."""

    def all_but_the_last(sound):
        return lambda fields, *rest: sound(fields[:-1] or fields, *rest)

    for name in (
        "_check_boundaries",
        "_check_context_parallel",
        "_check_target_mask",
        "_check_dtypes",
        "_check_shapes",
    ):
        with replaced(f"production.rows.guards:{name}", all_but_the_last):
            assert any(not check_guards(case).equal for case in drawn()), name
    assert guards.collate_checked.__module__ == "production.rows.batch"
    assert production.check_rows.__module__ == "production.rows.guards"
