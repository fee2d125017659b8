"""Plans with several models: what fits together, what each loses, and what is refused."""

from pathlib import Path

import msgspec
import pytest

from crossover.loadtests.capacity.machine_file import write_machine_file
from crossover.reports.devices.device_capacity import DeviceCapacity
from crossover.reports.plan.load_forecast import HOURS_A_MONTH
from crossover.reports.plan.mix_alternatives import MixAlternative, mix_alternatives
from crossover.reports.plan.plan_costs import CostPlan, make_plan
from crossover.reports.plan.plan_file import BadPlan, Question
from crossover.reports.plan.plan_machines import candidates_of, question_of_tables
from crossover.reports.plan.plan_options import Candidate, ordered_options
from crossover.reports.render.mix_text import alternatives_sentences
from crossover.reports.render.plan_page import plan_page
from crossover.reports.render.plan_text import as_json, as_text
from tests.loadtests.capacity.machine_files import machine_file
from tests.reports.plan.test_plan import machine

ROUTER = [{"model": "135m", "share": 0.7}, {"model": "360m", "share": 0.3}]
SHORT = {"prompt_tokens": 64, "output_tokens": 16}
TABLES: dict[str, object] = {"forecast": {"peak_rate": 0.2}, "devices": [], "workload": SHORT}


def measured(folder: Path) -> dict[str, object]:
    """A table of [[machines]]: a CPU on which 135M and 360M were measured."""
    write_machine_file(folder / "machine.json", machine_file())
    return {"file": str(folder / "machine.json")}


def candidate_of(tables: dict[str, object]) -> Candidate:
    (candidate,) = candidates_of(question_of_tables({**TABLES, **tables}, Path()))
    return candidate


def plan_of(tables: dict[str, object]) -> CostPlan:
    question = question_of_tables({**TABLES, **tables}, Path())
    return make_plan(question, candidates_of(question))


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> tuple[Candidate, CostPlan]:
    """The router on the measured CPU, and the plan of it."""
    machine = measured(tmp_path_factory.mktemp("router"))
    question = question_of_tables({**TABLES, "models": ROUTER, "machines": [machine]}, Path())
    (candidate,) = candidates_of(question)
    return candidate, make_plan(question, [candidate])


def test_a_mix_fits_a_measured_machine_with_less_of_each_model(
    tmp_path: Path, router: tuple[Candidate, CostPlan]
) -> None:
    mix, _ = router
    assert mix.low and mix.rate and mix.high and mix.low < mix.rate < mix.high
    assert mix.grade == "estimated"
    small, large = mix.models
    assert (small.model, large.model) == ("smollm2-135m", "smollm2-360m")
    assert small.rate == pytest.approx(0.7 * mix.rate) and small.unshared_rate
    assert small.kept_share == pytest.approx(small.rate / small.unshared_rate)
    assert small.slowdown is not None and 1.0 < small.slowdown < 2.0
    for model in mix.models:
        assert model.kept_share is not None and model.kept_share < 1
        alone = candidate_of({"model": model.model, "machines": [measured(tmp_path)]})
        assert alone.rate == pytest.approx(model.unshared_rate)


@pytest.mark.parametrize("where", ["device", "file"])
def test_one_model_with_all_requests_is_the_plan_of_that_model(tmp_path: Path, where: str) -> None:
    machine = measured(tmp_path) if where == "file" else {"device": "NVIDIA L4", "owned": 0}
    one = plan_of({"model": "135m", "machines": [machine]})
    mix = plan_of({"models": [{"model": "135m", "share": 1.0}], "machines": [machine]})
    assert mix.options == one.options
    assert [(change.rate, change.option) for change in mix.changes] == [
        (change.rate, change.option) for change in one.changes
    ]


def test_models_that_do_not_fit_into_the_memory_together_say_how_much_they_need(
    tmp_path: Path,
) -> None:
    """One of 8B in 4 bits fits into 8 GiB, two do not."""
    tables: dict[str, object] = {"slo": "batch", "machines": [measured(tmp_path)]}
    assert candidate_of({"model": "8b", **tables}).rate
    both = candidate_of(
        {"models": [{"model": "8b", "share": 0.5}, {"model": "8b", "share": 0.5}], **tables}
    )
    assert both.rate is None
    assert "the models need" in both.reason and "lab has 8.0 GiB" in both.reason
    assert both.certainty_at(1e-6, 1) == "no"


def test_the_memory_of_a_gpu_is_that_of_all_models() -> None:
    tables: dict[str, object] = {"devices": ["NVIDIA L40S"]}
    mix = candidate_of(
        {"models": [{"model": "8b", "share": 0.9}, {"model": "1b", "share": 0.1}], **tables}
    )
    alone = [candidate_of({"model": name, **tables}) for name in ("8b", "1b")]
    assert mix.memory_bytes == pytest.approx(sum(one.memory_bytes or 0.0 for one in alone))


def test_an_slo_of_one_model_binds_the_mix(tmp_path: Path) -> None:
    """No rate of the mix suffices if one of its models is too slow even without the other."""
    strict = [ROUTER[0], {**ROUTER[1], "slo": {"tpot_seconds": 0.0001}}]
    mix = candidate_of({"models": strict, "machines": [measured(tmp_path)]})
    assert not mix.rate and mix.reason.startswith("smollm2-360m: misses the SLO")


def test_rates_of_models_are_the_forecast() -> None:
    rates = [{"model": "135m", "rate": 0.3}, {"model": "360m", "rate": 0.1}]
    question = question_of_tables({"models": rates, "forecast": {"day": "office"}}, Path())
    assert question.forecast.peak_rate == pytest.approx(0.4)
    assert [part.share for part in question.parts] == pytest.approx([0.75, 0.25])


def test_each_model_has_lengths_an_slo_and_a_format_of_its_own() -> None:
    own = {"model": "360m", "share": 0.3, "slo": "batch", "format": "Q8_0", "workload": SHORT}
    question = question_of_tables(
        {"models": [ROUTER[0], own], "forecast": {"peak_rate": 1.0}, "slo": "reading"}, Path()
    )
    first, second = (part.question for part in question.parts)
    assert (first.slo.name, second.slo.name) == ("reading", "batch")
    assert (first.weight_format, second.weight_format) == ("Q4_0", "Q8_0")
    assert set(second.demand.lengths().prompt) == {64} != set(first.demand.lengths().prompt)


def test_the_text_the_page_and_the_json_say_what_each_model_loses(
    router: tuple[Candidate, CostPlan],
) -> None:
    _, made = router
    text = as_text(made, 200)
    assert "serves 70 % smollm2-135m + 30 % smollm2-360m at 12 requests a minute" in text
    assert "of that alone" in text and "its steps take" in text
    assert "smollm2-360m, 30 % of the requests: SLO" in text
    assert "Several models on one machine" in plan_page(made)
    (mix,) = msgspec.json.decode(as_json(made))["mixes"]
    assert [model["share"] for model in mix["models"]] == [0.7, 0.3]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "1b"}, "give one of model and [[models]]; got both"),
        ({"models": []}, "give one of model and [[models]]; got none"),
        ({"models": ROUTER[:1]}, "models: the shares must add up to 1, they add up to 0.7"),
        ({"models": [{"model": "1b"}]}, "models[0]: give one of share, rate; got none"),
        (
            {"models": [{"model": "1b", "share": 1.0, "rate": 1.0}]},
            "models[0]: give one of share, rate; got both",
        ),
        (
            {"models": [ROUTER[0], {"model": "1b", "rate": 1.0}]},
            "each model a share, or each model",
        ),
        (
            {"models": [{"model": "1b", "rate": 1.0}]},
            "forecast.peak_rate: leave it out, since the models have rates of their own",
        ),
        ({"models": [{"model": "1b", "share": 0.0}]}, "models[0].share must be above 0, got 0"),
        ({"models": [{"model": "9x", "share": 1.0}]}, "models[0]: "),
        ({"models": [{"model": "1b", "share": 1.0, "format": "Q9"}]}, "models[0].format: 'Q9'"),
        ({"api": {"input": 1.0, "output": 1.0}}, "api is of one model"),
        ({"cold_start": {}}, "cold_start is of one model"),
    ],
)
def test_a_contradiction_in_the_models_is_refused_by_name(
    change: dict[str, object], message: str
) -> None:
    with pytest.raises(BadPlan) as caught:
        question_of_tables({"forecast": {"peak_rate": 1.0}, "models": ROUTER, **change}, Path())
    assert message in str(caught.value)


def capacity(low: float, **more: object) -> DeviceCapacity:
    return DeviceCapacity(device="box", grade="predicted", low=low, rate=low, high=low, **more)  # type: ignore[arg-type]


def box(shared: float, small: float, large: float, **more: object) -> Candidate:
    """A machine with these capacities: of both models, and of each by itself."""
    unshared = (capacity(small), capacity(large))
    return machine("box", shared, shared, shared, 1.0, unshared=unshared, **more)


def question_of(rate: float, more: dict[str, object]) -> Question:
    tables = {"forecast": {"peak_rate": rate}, "models": ROUTER, "workload": SHORT, **more}
    return question_of_tables(tables, Path())


def alternative(rate: float, candidate: Candidate, **more: object) -> MixAlternative:
    question = question_of(rate, more)
    options = ordered_options(question, [candidate], question.forecast)
    (found,) = mix_alternatives(question, [candidate], options)
    return found


def words(found: MixAlternative) -> str:
    return " ".join(alternatives_sentences([found]))


def test_machines_for_all_models_and_for_each_cost_what_was_computed_by_hand() -> None:
    """1.5 requests/s: 1.05/s of the small model and 0.45/s of the large one."""
    found = alternative(1.5, box(2.0, small=2.0, large=1.0))
    assert (found.shared.machines, found.shared.dollars) == (1, pytest.approx(HOURS_A_MONTH))
    assert (found.separate.machines, found.separate.dollars) == (
        2,
        pytest.approx(2 * HOURS_A_MONTH),
    )
    assert found.separate.busy_shares == pytest.approx((1.05 / 2.0, 0.45 / 1.0))
    assert found.largest_model == "smollm2-360m" and found.largest is not None
    assert (found.largest.machines, found.largest.dollars) == (2, pytest.approx(2 * HOURS_A_MONTH))
    text = words(found)
    assert (
        "all models on each cost $730 a month less" in text
        and "busy for only 53 % and 45 %" in text
    )
    assert "smollm2-360m for all requests would cost $730 a month more" in text


def test_models_that_slow_each_other_down_are_cheaper_on_machines_of_their_own() -> None:
    found = alternative(1.5, box(0.4, small=2.0, large=2.0))
    assert (found.shared.machines, found.separate.machines) == (4, 2)
    assert "a machine for each model costs $1,461 a month less" in words(found)
    assert "smollm2-360m for all requests costs no more" in words(found)


def test_spares_are_for_each_model_where_it_has_machines_of_its_own() -> None:
    found = alternative(1.5, box(2.0, small=2.0, large=1.0), spares=1)
    assert (found.shared.machines, found.separate.machines) == (2, 4)


def test_your_machines_are_divided_among_the_models_and_further_ones_are_rented() -> None:
    """Yours costs nothing here, since it takes no power; the second one is rented."""
    yours = box(2.0, small=2.0, large=1.0, owned=1, watts=0.0)
    found = alternative(1.5, yours)
    assert (found.shared.machines, found.shared.dollars) == (1, 0.0)
    assert (found.separate.machines, found.separate.dollars) == (2, pytest.approx(HOURS_A_MONTH))


def test_models_that_do_not_fit_together_need_a_machine_for_each() -> None:
    full = box(0.0, small=2.0, large=1.0, reason="the models need 9 GiB together, box has 8 GiB")
    found = alternative(1.5, msgspec.structs.replace(full, rate=None, low=None, high=None))
    assert (found.shared.certainty, found.separate.machines) == ("no", 2)
    assert "only with a machine for each model (the models need 9 GiB together" in words(found)


def test_a_model_by_itself_needs_fewer_cards_at_the_price_of_each() -> None:
    """Both need two cards that share a step, one of them one card."""
    pair = box(2.0, small=2.0, large=1.0, devices=2)
    pair = msgspec.structs.replace(pair, dollars_per_hour=2.0)
    found = alternative(1.5, pair)
    assert found.shared.dollars == pytest.approx(2 * HOURS_A_MONTH)
    assert found.separate.dollars == pytest.approx(2 * HOURS_A_MONTH)


def test_models_with_other_requests_have_no_row_of_the_largest_for_all() -> None:
    own = [ROUTER[0], {**ROUTER[1], "slo": "batch"}]
    assert alternative(1.5, box(2.0, small=2.0, large=1.0), models=own).largest is None


def test_the_capacities_of_the_alternatives_are_those_of_plans_for_one_model(
    tmp_path: Path, router: tuple[Candidate, CostPlan]
) -> None:
    mix, made = router
    for own, keys in zip(mix.unshared, ROUTER, strict=True):
        alone = candidate_of({"model": keys["model"], "machines": [measured(tmp_path)]})
        assert (own.low, own.rate) == pytest.approx((alone.low, alone.rate))
    assert "a machine for each" in as_text(made, 200)
    assert "a machine for each" in plan_page(made)
