"""Sums of lists of tensors with weights, and changes on top of values."""

from __future__ import annotations

import torch

from polytempo.optim.several_workers import weighted_sum, with_change

A, B, C = (torch.tensor(values) for values in ([1.0, 2.0], [3.0, 5.0], [0.1, 0.7]))


def test_a_sum_takes_its_terms_in_their_order_and_changes_none() -> None:
    before = [one.clone() for one in (A, B, C)]
    (total,) = weighted_sum(([one], weight) for one, weight in ((A, 0.5), (B, 0.3), (C, 0.2)))
    assert torch.equal(total, A * 0.5 + B * 0.3 + C * 0.2)
    assert all(torch.equal(one, old) for one, old in zip((A, B, C), before, strict=True))


def test_a_list_that_counts_alone_and_whole_is_itself() -> None:
    assert weighted_sum([([C, A], 1.0)])[0] is C
    assert weighted_sum([]) == []


def test_what_was_not_used_by_one_is_that_of_the_others() -> None:
    first, second, third = weighted_sum([([None, A, None], 0.5), ([B, None, None], 0.5)])
    assert torch.equal(first, B * 0.5)
    assert torch.equal(second, A * 0.5)
    assert third is None


def test_sparse_gradients_are_added_up() -> None:
    rows = [torch.sparse_coo_tensor([[row]], [[1.0, 2.0]], (3, 2), check_invariants=True) for row in (0, 2)]
    (total,) = weighted_sum(([one], 0.5) for one in rows)
    assert total.to_dense().tolist() == [[0.5, 1.0], [0.0, 0.0], [0.5, 1.0]]


def test_a_change_is_added_to_what_others_have_made_and_is_taken_as_it_is_where_they_made_nothing() -> None:
    old, new = [A, C], [A + 1, C * 3]
    changed, alone = with_change([B, C], new, old)
    assert torch.equal(changed, B + (new[0] - A))
    assert alone is new[1]  # C + (3 C - C) need not be 3 C, to the bit
