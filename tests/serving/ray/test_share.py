"""What each replica is given, and the options that replicas cannot honour."""

import pytest

from serving.errors import ServingError
from serving.placement.policy import Policy
from serving.ray.share import Node, Share, bounds_of, check_options, share_of
from serving.registry.options import ServeOptions


def on_ray(**given: object) -> ServeOptions:
    return ServeOptions(**{"models": ("fake",), "on": "ray", **given})


@pytest.mark.parametrize(
    ("nodes", "options", "share"),
    [
        ([Node(8)], {}, Share((1, 1), 8, 0)),
        ([Node(8)], {"replicas": "2"}, Share((2, 2), 4, 0)),
        ([Node(8), Node(4)], {"replicas": "3"}, Share((3, 3), 4, 0)),
        ([Node(8), Node(4)], {"replicas": "1-4"}, Share((1, 4), 2, 0)),
        ([Node(8), Node(8)], {"replicas": "4", "threads": 2}, Share((4, 4), 2, 0)),
        ([Node(8, 2), Node(64)], {"replicas": "2"}, Share((2, 2), 4, 1)),
        ([Node(8, 2)], {"replicas": "4", "policy": Policy.cpu_only}, Share((4, 4), 2, 0)),
    ],
)
def test_the_cores_are_divided_among_the_most_replicas(
    nodes: list[Node], options: dict[str, object], share: Share
) -> None:
    assert share_of(nodes, on_ray(**options)) == share


@pytest.mark.parametrize(
    ("nodes", "options", "said"),
    [
        ([Node(2)], {"replicas": "3"}, "3 with 1 core each do not fit"),
        ([Node(4)], {"replicas": "1-3", "threads": 2}, "3 with --threads 2 each do not fit"),
        ([Node(8, 1)], {"replicas": "2"}, "2 replicas need 2 GPUs, and the cluster has 1"),
        ([Node(8)], {"policy": Policy.gpu_only}, "1 replicas need 1 GPUs"),
        ([Node(8)], {"replicas": "0"}, "'0' is no number of replicas"),
        ([Node(8)], {"replicas": "4-2"}, "'4-2' is no number of replicas"),
    ],
)
def test_what_does_not_fit_is_refused(
    nodes: list[Node], options: dict[str, object], said: str
) -> None:
    with pytest.raises(ServingError, match=said):
        share_of(nodes, on_ray(**options))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (ServeOptions(models=("fake",), replicas="2"), "--replicas 2 needs to know where"),
        (on_ray(cores="0-3"), "--cores cannot be honoured with --on ray"),
        (on_ray(admin_port=8001), "--admin-port cannot be honoured with --on ray"),
        (on_ray(idle_unload_seconds=60.0), "--idle-unload cannot be honoured with --on ray"),
        (on_ray(models=("fake", "135m")), "serves one model, and 2 are named"),
    ],
)
def test_options_that_replicas_cannot_honour_are_refused(options: ServeOptions, said: str) -> None:
    with pytest.raises(ServingError, match=said):
        check_options(options)


def test_a_server_without_replicas_and_one_with_them_are_taken() -> None:
    check_options(ServeOptions(models=("fake", "135m"), cores="0-3"))
    check_options(on_ray(replicas="1-4", threads=2, standby="warm"))
    assert bounds_of(None) == (1, 1)
    assert Share((2, 4), 1, 0).words == "2 to 4 replicas with 1 core each"
