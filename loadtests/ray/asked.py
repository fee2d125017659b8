"""What does not go with `crossover campaign run --on ray`."""

from __future__ import annotations

from loadtests.campaign.campaign_file import Plan, check_one_machine
from loadtests.errors import BadCampaign, LoadError
from serving.ray_serve import is_installed, prepare_environment


def is_on_ray(on: str | None, plan: Plan | None = None, dry_run: bool = False) -> bool:
    """Whether the nodes of a cluster measure; if so, ray may be imported from now on.

    Raises LoadError for what cannot be honoured.
    """
    if on is None:
        if plan is not None:
            check_one_machine(plan)
        return False
    if on != "ray":
        raise LoadError(f"--on {on!r} is not ray, the only place beside this machine")
    if not is_installed():
        raise LoadError("--on ray needs Ray: pip install 'llm-crossover[scale]'")
    if dry_run:
        raise LoadError("--dry-run looks at this machine alone: leave --on ray out")
    if plan is not None and plan.campaign.target is not None:
        url = plan.campaign.target.url
        raise BadCampaign(f"{url} is measured from one machine: leave --on ray out")
    if plan is not None and plan.is_auto:
        raise BadCampaign(
            "models 'auto' are chosen on this machine: name them, or leave --on ray out"
        )
    if plan is not None and plan.campaign.engines:
        raise BadCampaign("engines of others are started on this machine: leave --on ray out")
    prepare_environment()
    return True
