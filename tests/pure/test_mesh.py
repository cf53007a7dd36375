"""The mesh: every rank has one place, and the groups of each axis partition the ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polytempo.errors import UsageError
from polytempo.mesh import Mesh, MeshPoint

AXES = st.integers(1, 5)
GROUPS = ("data_group", "pipe_group", "tensor_group", "replica_group")


@given(AXES, AXES, AXES)
def test_places_and_ranks_are_one_to_one(data: int, pipe: int, tensor: int) -> None:
    mesh = Mesh(data, pipe, tensor)
    points = [mesh.point(rank) for rank in range(mesh.size)]
    assert len(set(points)) == mesh.size == data * pipe * tensor
    assert [mesh.rank(point) for point in points] == list(range(mesh.size))


@given(AXES, AXES, AXES)
def test_the_groups_of_an_axis_partition_the_ranks(data: int, pipe: int, tensor: int) -> None:
    mesh = Mesh(data, pipe, tensor)
    for name, size in zip(GROUPS, (data, pipe, tensor, pipe * tensor), strict=True):
        groups = {getattr(mesh, name)(rank) for rank in range(mesh.size)}
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.size))
        assert {len(group) for group in groups} == {size}
        assert all(rank in getattr(mesh, name)(rank) for rank in range(mesh.size))


def test_tensor_groups_are_adjacent_and_data_is_outermost() -> None:
    mesh = Mesh(2, 2, 2)
    assert mesh.tensor_group(5) == (4, 5)
    assert mesh.pipe_group(5) == (5, 7)
    assert mesh.data_group(5) == (1, 5)
    assert mesh.replica_group(5) == (4, 5, 6, 7)
    assert mesh.point(5) == MeshPoint(1, 0, 1)


def test_an_axis_without_ranks_is_refused() -> None:
    with pytest.raises(UsageError, match="expected pipe of at least 1, got 0"):
        Mesh(1, 0, 1)
