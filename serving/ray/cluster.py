"""Our deployment on a Ray cluster.

handle = deploy(options, limits, share)       # returns while the replicas are being started
failure()                                     # why there will be none
withdraw()
"""

from __future__ import annotations

import contextlib
from typing import Any

from ray import serve
from ray.serve.api import RunTarget
from ray.serve.config import (
    AutoscalingConfig,
    AutoscalingPolicy,
    ProxyLocation,
    RequestRouterConfig,
)
from ray.serve.schema import ApplicationStatus

from serving.http.limits import Limits
from serving.ray.connection import last_line
from serving.ray.replica import Replica
from serving.ray.share import Share
from serving.registry.options import ServeOptions

APPLICATION = "crossover"
HEALTH_PERIOD_SECONDS = 1.0  # between two looks at a replica
HEALTH_TIMEOUT_SECONDS = 30.0  # a replica that prepares weights is slow to answer
CONSTRUCTOR_TRIES = 3


def deploy(options: ServeOptions, limits: Limits, share: Share) -> Any:
    """The handle of the deployment; its replicas are being started."""
    serve.start(proxy_location=ProxyLocation.Disabled)
    least, most = share.replicas
    how_many: dict[str, Any] = {"num_replicas": most}
    if least < most:
        scaling = AutoscalingConfig(
            min_replicas=least,
            max_replicas=most,
            target_ongoing_requests=options.slots,
            policy=AutoscalingPolicy(policy_function="serving.ray.scaling:wanted"),
        )
        how_many = {"autoscaling_config": scaling}
    deployment = serve.deployment(
        Replica,
        name=APPLICATION,
        ray_actor_options={"num_cpus": share.cpus, "num_gpus": share.gpus},
        graceful_shutdown_timeout_s=options.drain_seconds,
        health_check_period_s=HEALTH_PERIOD_SECONDS,
        health_check_timeout_s=HEALTH_TIMEOUT_SECONDS,
        max_constructor_retry_count=CONSTRUCTOR_TRIES,
        request_router_config=RequestRouterConfig(
            request_router_class="serving.ray.router:NamedRouter"
        ),
        **how_many,
    )
    target = RunTarget(
        deployment.bind(options, limits, share.cpus), name=APPLICATION, route_prefix=None
    )
    (handle,) = serve.run_many([target], wait_for_applications_running=False)
    return handle


def failure() -> str | None:
    """Why no replica can be started; None while one may be."""
    application = serve.status().applications.get(APPLICATION)
    if application is None or application.status != ApplicationStatus.DEPLOY_FAILED:
        return None
    return f"no replica could be started: {last_line(application.message)}"


def withdraw() -> None:
    """End the replicas."""
    with contextlib.suppress(Exception):  # the cluster may be gone: so are the replicas
        serve.delete(APPLICATION)
