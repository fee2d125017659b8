"""Which node measures which cell."""

import pytest

from loadtests.campaign.campaign_file import parse_campaign
from loadtests.campaign.cells import Cell
from loadtests.errors import BadCampaign, LoadError
from loadtests.ray.asked import is_on_ray
from loadtests.ray.nodes import Node, fits, kind_of_cell, needs, next_of, node_of

CAMPAIGN = """
name = "two kinds"
models = ["135m"]
backends = ["fake"]
[[hardware]]
name = "cpu"
cores = 4
[[hardware]]
name = "l4"
accelerator = "L4"
"""
SMALL, LARGE = Node("a" * 40, "10.0.0.1", 2), Node("b" * 40, "10.0.0.2", 8)
WITH_GPU = Node("c" * 40, "10.0.0.3", 8, 1, ("L4",))


def cells() -> list[Cell]:
    return parse_campaign(CAMPAIGN).cells


def test_a_cell_goes_where_its_hardware_is() -> None:
    on_cpu, on_gpu = cells()
    assert [fits(on_cpu, node) for node in (SMALL, LARGE, WITH_GPU)] == [False, True, True]
    assert [fits(on_gpu, node) for node in (SMALL, LARGE, WITH_GPU)] == [False, False, True]
    kinds = [[SMALL], [WITH_GPU], [LARGE, LARGE]]
    assert kind_of_cell(on_cpu, kinds) == 2  # most nodes that fit
    assert kind_of_cell(on_gpu, kinds) == 1
    assert next_of([on_gpu, on_cpu], LARGE) is on_cpu
    assert next_of([on_gpu], LARGE) is None


def test_a_cell_has_its_node_alone() -> None:
    on_cpu, on_gpu = cells()
    assert needs(on_cpu, LARGE) == {"num_cpus": 8, "max_retries": 0}
    asked = needs(on_gpu, WITH_GPU)
    assert asked["num_gpus"] == 1 and asked["resources"] == {"accelerator_type:L4": 0.001}


def test_what_no_node_has_is_refused_with_what_there_is() -> None:
    with pytest.raises(BadCampaign, match="accelerator 'L4', which no node .*10.0.0.2"):
        kind_of_cell(cells()[1], [[LARGE]])


def test_a_row_of_ray_s_table_is_a_node() -> None:
    row = {
        "NodeID": "c" * 40,
        "NodeManagerAddress": "10.0.0.3",
        "Resources": {"CPU": 8.0, "GPU": 1.0, "accelerator_type:L4": 1.0, "memory": 1e9},
    }
    assert node_of(row) == WITH_GPU


def test_a_machine_can_be_asked_for_only_where_there_are_several() -> None:
    plan = parse_campaign(CAMPAIGN)
    with pytest.raises(BadCampaign, match="accelerator 'L4': only --on ray"):
        is_on_ray(None, plan)
    with pytest.raises(LoadError, match="'slurm' is not ray"):
        is_on_ray("slurm", plan)
