from __future__ import annotations

import pytest

from launcher.errors import UserError
from launcher.plan.alternatives import FITS_SHARE, first_that_fits, weigh_all
from launcher.plan.cards import CARDS, find_card, parse_cards
from launcher.plan.known_models import KNOWN, find_model, known_config
from launcher.plan.what_if import Question, answer, flops_per_token, setting_for
from launcher.policy.save_interval import lost_share


def question(gpus: str = "8xA100-80G", model: str = "Qwen/Qwen2.5-32B", **more: object) -> Question:
    return Question(find_model(model), parse_cards(gpus), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "card", "count"),
    [
        ("8xA100-80G", "A100-80G", 8),
        ("4x8xA100-80G", "A100-80G", 32),
        ("1xRTX4090", "RTX4090-24G", 1),
        ("2xnvidia-a100-80gb", "A100-80G", 2),
        ("2xH200", "H200-141G", 2),
    ],
)
def test_cards_by_name(text: str, card: str, count: int) -> None:
    found = parse_cards(text)
    assert (found.card.name, found.num_cards) == (card, count)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("A100-80G", "such as 8xA100-80G"),
        ("0xA100-80G", "such as 8xA100-80G"),
        ("8xA100", "write A100-80G or A100-40G"),
        ("8xA100-8G", "A100-80G"),
        ("8xzzz", "known are A100-80G"),
    ],
)
def test_unknown_cards(text: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_cards(text)
    assert said in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-7B"),
        ("qwen2.5-7b-instruct", "Qwen/Qwen2.5-7B"),
        ("meta-llama/Llama-2-7b-chat-hf", "meta-llama/Llama-2-7b-hf"),
    ],
)
def test_models_by_name(name: str, found: str) -> None:
    assert find_model(name).source == found


def test_unknown_models_get_the_nearest_names() -> None:
    with pytest.raises(UserError) as caught:
        find_model("Qwen/Qwen2.5-33B")
    assert "Qwen/Qwen2.5-32B" in str(caught.value)
    assert "config.json" in str(caught.value), "the way out for any other model"
    with pytest.raises(UserError, match=r"known are .*Mixtral"):
        find_model("zzzzzzzzzz")


def test_every_row_of_the_tables_is_whole() -> None:
    for name in KNOWN:
        assert find_model(name).num_parameters, name
        assert known_config(name)["vocab_size"] > 30_000
    assert len({card.name for card in CARDS}) == len(CARDS)
    assert all(find_card(card.name) is card for card in CARDS)


def test_a_32b_with_lora_fits_on_one_a100_of_80_gib() -> None:
    found = answer(question())
    assert found.best is not None
    assert (found.best.zero_stage, found.best.micro_batch, found.fewest) == (2, 1, 1)
    assert found.best.memory.total_bytes < FITS_SHARE * found.best.card_bytes
    refused = [one for one in found.alternatives if not one.fits]
    assert refused, "the next larger micro-batch is shown"
    assert all(one.why for one in refused)


def test_fewest_cards_are_enough_and_one_less_is_not() -> None:
    asked = question("8xA100-80G", "Qwen/Qwen2.5-7B", method="full")
    found = answer(asked)
    assert found.fewest is not None
    assert found.fewest > 1
    for cards, fits in ((found.fewest, True), (found.fewest - 1, False)):
        fewer = question(f"{cards}xA100-80G", "Qwen/Qwen2.5-7B", method="full")
        ways = weigh_all(fewer.model, setting_for(fewer), fewer.gpus.card.memory_bytes)
        best = first_that_fits([one for one in ways if not one.offload_optimizer and not one.offload_params])
        assert (best is not None) == fits


def test_other_cards_that_are_enough() -> None:
    """The weights are 61 GiB: one card of 140 GiB; as few of each as the same question answers for that card."""
    found = answer(question())
    counts = {one.card.name: one.num_cards for one in found.elsewhere}
    assert counts["H200-141G"] == 1
    assert counts["L20-48G"] > 1
    assert "A100-80G" not in counts
    for name in ("L20-48G", "A10-24G", "T4-16G"):
        assert counts[name] == answer(question(f"8x{name}")).fewest
    sizes = [one.num_cards * one.card.memory_gib for one in found.elsewhere]
    assert sizes == sorted(sizes)


def test_what_never_fits_says_so() -> None:
    found = answer(question("1xT4-16G", "meta-llama/Meta-Llama-3-70B", method="lora", max_length=200_000))
    assert (found.best, found.hours, found.saves) == (None, None, None)
    assert found.fewest is None
    assert all("GiB" in one.why for one in found.alternatives)
    assert found.precision == "fp16", "a T4 has no bf16"


def test_operations_of_a_token() -> None:
    """6 N for full training without recomputing, 2 N less for adapters, 2 N more with it (and attention)."""
    model = find_model("Qwen/Qwen2.5-7B")
    weights = model.num_parameters or 0
    full, lora = (flops_per_token(model, method, 1, recomputes=False) for method in ("full", "lora"))
    assert full == pytest.approx(6 * weights, rel=1e-3)
    assert lora == pytest.approx(4 * weights, rel=1e-3)
    assert flops_per_token(model, "lora", 1, recomputes=True) == pytest.approx(6 * weights, rel=1e-3)
    attention = flops_per_token(model, "full", 8192, recomputes=False) - full
    assert attention == pytest.approx(6 * 8191 * 28 * 3584)
    sparse = find_model("mistralai/Mixtral-8x7B-v0.1")
    assert flops_per_token(sparse, "full", 1, recomputes=False) == pytest.approx(6 * 12.88e9, rel=1e-2)


def test_hours_and_cost() -> None:
    found = answer(question(tokens=10**9, price=2.0, utilisation=0.5))
    assert found.hours is not None
    assert found.tokens_per_s is not None
    assert found.hours == pytest.approx(1e9 / found.tokens_per_s / 3600)
    assert found.cost == pytest.approx(found.hours * 8 * 2.0)
    slower = answer(question(tokens=10**9, utilisation=0.25))
    assert slower.hours == pytest.approx(2 * found.hours)
    assert slower.cost is None


def test_how_often_to_save_loses_least() -> None:
    found = answer(question(model="Qwen/Qwen2.5-7B", method="full", preemptions_per_day=12))
    saves, step_s = found.saves, found.step_s
    assert saves is not None
    assert step_s is not None
    assert saves.between_s == 7200
    best = saves.disk_every_steps
    for other in (best - 1, best + 1):
        assert lost_share(other, saves.disk_stall_s, step_s, 7200) >= saves.disk_lost
    assert saves.memory_lost < saves.disk_lost
    rarer = answer(question(model="Qwen/Qwen2.5-7B", method="full", preemptions_per_day=1)).saves
    assert rarer is not None
    assert rarer.disk_every_steps > best
