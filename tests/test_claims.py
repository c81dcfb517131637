"""Verdicts from planted runs, the file of claims, and the command."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml

from kl_comedy import cli
from kl_comedy.files import FileError
from kl_comedy.report.checks import check_alike, check_greater, check_stable
from kl_comedy.report.claims import claims_markdown, findings_table, judge_claims
from kl_comedy.report.intervals import difference
from kl_comedy.report.records import Records, final_values, read_claims, unstable_runs
from kl_comedy.study.sweeps import load_sweep, plan
from kl_comedy.theory.config import KLConfig

ROOT = Path(__file__).parents[1]
CLAIMS = ROOT / "data/claims.yaml"
START = [(policy, seed) for policy in ("a", "b") for seed in (0, 1)]


def record(folder, cells, sweep="on_policy", rates=True):
    """Runs of each cell, a KLConfig and more: pass@1 at the end, and its curve before."""
    rows, curves, problems = [], [], []
    for number, (kl, final, more) in enumerate(cells):
        for policy, seed in START:
            run = f"{number}-{policy}{seed}"
            last = np.clip(final + 0.01 * seed, 0, 1)
            rows.append({
                "run": run, "scale": "cpu", "policy": policy, "seed": seed, "state": "done",
                "minibatches": 1, "max_grad_norm": 0.0, "final_pass_sum": last,
                "final_pass_out": final, "final_kl_forward": 1 - final, "final_entropy": final,
            } | kl.to_dict() | more)  # fmt: skip
            curves += [{"run": run, "step": i, "pass_sum": p} for i, p in enumerate([0.3, last])]
            problems.append({"run": run, "task": "sum", "rates": json.dumps([last] * 3)})
    (folder / sweep).mkdir(parents=True)
    pd.DataFrame(rows).to_csv(folder / sweep / "runs.csv", index=False)
    pd.DataFrame(curves).to_csv(folder / sweep / "metrics.csv", index=False)
    if rates:
        pd.DataFrame(problems).to_csv(folder / sweep / "final_rates.csv", index=False)
    return Records(folder, read_claims(CLAIMS))


def verdicts(folder):
    return {claim["id"]: word for claim, word, _ in judge_claims(CLAIMS, folder)}


def side(estimator, placement, beta, **more):
    return {"estimator": estimator, "placement": placement, "beta": beta, **more}


K1, K3 = KLConfig("k1", "reward", 0.05), KLConfig("k3", "loss", 0.05)


@pytest.mark.parametrize("rates", [True, False])
@pytest.mark.parametrize(
    ("k1", "k3", "word"),
    [(0.9, 0.7, "reproduced"), (0.7, 0.9, "not reproduced"), (0.8, 0.8, "not reproduced")],
)
def test_the_better_one_is_found(k1, k3, word, rates, tmp_path):
    record(tmp_path, [(K1, k1, {}), (K3, k3, {})], rates=rates)
    assert verdicts(tmp_path)["C7"] == word


def test_better_in_domain_alone_is_partly(tmp_path):
    record(tmp_path, [(K1, 0.9, {"final_pass_out": 0.5}), (K3, 0.7, {"final_pass_out": 0.6})])
    assert verdicts(tmp_path)["C7"] == "partly"


@pytest.mark.parametrize(
    ("curve", "state", "word"),
    [([0.3, 0.9, 0.1], "done", "reproduced"), ([0.3, 0.9, 0.8], "done", "not reproduced"),
     ([0.3, 0.9], "diverged", "reproduced")],
)  # fmt: skip
def test_a_collapse_is_a_fall_from_the_best_or_a_divergence(curve, state, word, tmp_path):
    cells = [(KLConfig("k3", "reward", beta), curve[-1], {"state": state}) for beta in (0.1, 0.3)]
    record(tmp_path, cells)
    runs = pd.read_csv(tmp_path / "on_policy/runs.csv").run
    pd.DataFrame(
        [{"run": run, "step": i, "pass_sum": p} for run in runs for i, p in enumerate(curve)]
    ).to_csv(tmp_path / "on_policy/metrics.csv", index=False)
    assert verdicts(tmp_path)["C4"] == word


def test_without_runs_nothing_is_judged(tmp_path):
    assert set(verdicts(tmp_path).values()) == {"not yet run"}
    record(tmp_path, [(K1, 0.9, {})])
    assert verdicts(tmp_path)["C7"] == "not yet run"


def test_runs_are_paired_by_their_start(tmp_path):
    """A configuration that was run on an easier start alone is not better for it."""
    records = record(tmp_path, [(K1, 0.5, {}), (K3, 0.5, {})])
    runs = pd.read_csv(tmp_path / "on_policy/runs.csv")
    runs.loc[runs.policy == "b", "final_pass_out"] += 0.4  # the easier base policy
    lost = (runs.policy == "a") & (runs.placement == "reward")
    runs[~lost].to_csv(tmp_path / "on_policy/runs.csv", index=False)
    check = {"metric": "pass_out", "a": side("k1", "reward", 0.05), "b": side("k3", "loss", 0.05)}
    found = check_greater(check, records)
    assert not found.holds and found.effect == pytest.approx(0) and found.runs == 2


def test_alike_needs_the_whole_interval(tmp_path):
    records = record(tmp_path, [(K1, 0.80, {}), (K3, 0.83, {})])
    check = {"metric": "pass_sum", "a": side("k1", "reward", 0.05), "b": side("k3", "loss", 0.05)}
    assert check_alike(check | {"within": 0.05}, records).holds
    assert not check_alike(check | {"within": 0.02}, records).holds


@pytest.mark.parametrize("runs", [2, 4, 12])
def test_the_interval_covers_the_truth_with_few_runs_too(runs):
    rng = np.random.default_rng(1)
    index = pd.MultiIndex.from_product([["a"], range(runs)])
    zero = pd.DataFrame(np.zeros((runs, 20)), index=index)
    hits, studies = 0, 600
    for _ in range(studies):
        gap = 0.3 + 0.1 * rng.normal(size=(runs, 1)) + 0.1 * rng.normal(size=(runs, 20))
        _, low, high, n = difference(pd.DataFrame(gap, index=index), zero)
        hits += low < 0.3 < high
    assert n == runs
    assert hits / studies > 0.93


def test_one_run_a_side_is_not_yet_run(tmp_path):
    record(tmp_path, [(K1, 0.9, {}), (K3, 0.7, {})])
    runs = pd.read_csv(tmp_path / "on_policy/runs.csv")
    runs[(runs.seed == 0) & (runs.policy == "a")].to_csv(
        tmp_path / "on_policy/runs.csv", index=False
    )
    assert verdicts(tmp_path)["C7"] == "not yet run" == verdicts(tmp_path)["C6"]


def test_a_diverged_run_passes_nothing_and_has_no_kl(tmp_path):
    records = record(tmp_path, [(K1, 0.9, {}), (K3, 0.7, {})])
    runs = pd.read_csv(tmp_path / "on_policy/runs.csv")
    bad = (runs.placement == "loss") & (runs.policy == "a") & (runs.seed == 0)
    runs.loc[bad, "state"] = "diverged"
    runs.loc[bad, [c for c in runs if c.startswith("final_")]] = np.nan
    rates = pd.read_csv(tmp_path / "on_policy/final_rates.csv")
    rates = rates[rates.run != runs[bad].run.item()]
    runs.to_csv(tmp_path / "on_policy/runs.csv", index=False)
    rates.to_csv(tmp_path / "on_policy/final_rates.csv", index=False)
    sides = {"a": side("k1", "reward", 0.05), "b": side("k3", "loss", 0.05)}
    passed = check_greater(sides | {"metric": "pass_sum"}, records)
    assert passed.runs == 4 and passed.effect == pytest.approx((3 * 0.2 + 0.9) / 4, abs=0.01)
    forward = check_greater(sides | {"metric": "kl_forward"}, records)
    assert forward.runs == 3 and not forward.holds


def test_the_noise_of_a_flat_curve_is_no_collapse(tmp_path):
    """The best of six tests of 64 responses lies well above the mean."""
    kl = KLConfig("k1", "reward", 0.05)
    records = record(tmp_path, [(kl, 0.30, {})])
    runs = pd.read_csv(tmp_path / "on_policy/runs.csv").run
    pd.DataFrame([{"run": run, "step": i, "pass_sum": p} for run in runs
                  for i, p in enumerate([0.30, 0.44, 0.27, 0.30])]).to_csv(
        tmp_path / "on_policy/metrics.csv", index=False)  # fmt: skip
    assert not unstable_runs(records, side("k1", "reward", 0.05)).any()


def test_off_policy_runs_come_from_their_own_sweep(tmp_path):
    k1 = KLConfig("k1", "loss", 0.1)
    record(tmp_path, [(k1, 0.9, {})])
    record(tmp_path, [(k1, 0.6, {"minibatches": 4})], sweep="variants")
    (finding,) = [
        f for claim, _, found in judge_claims(CLAIMS, tmp_path, ["C13"]) for f in found
        if "K1 in loss" in f.words
    ]  # fmt: skip
    assert finding.holds and finding.effect == pytest.approx(0.3)


def test_beside_a_figure_stands_the_claim_with_its_verdict_effect_interval_and_runs(tmp_path):
    record(tmp_path, [(K1, 0.9, {"final_pass_out": 0.5}), (K3, 0.7, {"final_pass_out": 0.6})])
    said = claims_markdown(CLAIMS, tmp_path, ["C7", "C5"])
    stable, better = said.split("\n\n")
    assert better.startswith("**C7, the paper:** At beta 0.05 K1 in the reward beats K3 in the")
    assert "**Here, at scale cpu: partly.** Holds: pass@1 in-domain: K1 in reward above" in better
    assert "beta 0.05 (+0.200 [+0.200, +0.200], n = 4). Does not hold: pass@1 out-of-" in better
    assert "cpu: not yet run.** Holds: stable: K3 in loss, beta 0.05 (0 of 4 runs" in stable
    assert " unstable [0%, 60%]). Not yet run: " in stable
    with pytest.raises(FileError, match="no claim C99"):
        claims_markdown(CLAIMS, tmp_path, ["C99"])


@pytest.mark.parametrize("unstable", [0, 1, 4])
def test_a_share_of_runs_has_an_interval_that_holds_it(unstable, tmp_path):
    """Clopper and Pearson: 0 of 4 leave everything up to 60% open."""
    records = record(tmp_path, [(K1, 0.9, {})])
    runs = pd.read_csv(tmp_path / "on_policy/runs.csv")
    runs.loc[: unstable - 1, "state"] = "diverged"
    runs.to_csv(tmp_path / "on_policy/runs.csv", index=False)
    found = check_stable({"a": side("k1", "reward", 0.05)}, records)
    assert found.low <= found.effect == unstable / 4 <= found.high and found.runs == 4
    ends = {0: (0, 0.602), 1: (0.006, 0.806), 4: (0.398, 1)}[unstable]
    assert (found.low, found.high) == pytest.approx(ends, abs=5e-4)


@pytest.mark.parametrize("rates", [True, False])
def test_a_new_task_is_judged_by_its_own_pass_rate(rates, tmp_path):
    """The runs' parameter `task` says which task was trained; nothing else is changed."""
    record(tmp_path, [(K1, 0.9, {"task": "dyck"}), (K3, 0.7, {"task": "dyck"})], rates=rates)
    for path in (tmp_path / "on_policy").glob("*.csv"):
        text = path.read_text().replace("pass_sum", "pass_dyck").replace(",sum,", ",dyck,")
        path.write_text(text)
    assert verdicts(tmp_path)["C7"] == "reproduced"
    records = Records(tmp_path, read_claims(CLAIMS))
    assert not unstable_runs(records, side("k1", "reward", 0.05)).any()
    values = final_values(records, side("k1", "reward", 0.05), "pass_trained")
    assert values.shape == (4, 3 if rates else 1)


def test_runs_of_two_tasks_are_not_compared(tmp_path):
    records = record(tmp_path, [(K1, 0.9, {"task": "dyck"}), (K1, 0.7, {"task": None})])
    with pytest.raises(ValueError, match="several tasks, dyck, sum"):
        final_values(records, side("k1", "reward", 0.05), "pass_trained")


# The file


def test_every_side_names_runs_that_the_sweeps_make():
    """A misspelt field or an absent cell would leave a claim "not yet run" for ever."""
    content = read_claims(CLAIMS)
    for claim in content["claims"]:
        for check in claim["checks"]:
            for name in {"a", "b"} & set(check):
                if check["kind"] == "exact":
                    continue
                wanted = content["defaults"] | check[name]
                sweep = load_sweep(ROOT / f"data/sweeps/{wanted.pop('sweep')}.yaml", ROOT)
                if wanted["placement"] == "none":
                    wanted = {"placement": "none", "minibatches": wanted["minibatches"]}
                runs = plan(sweep, "cpu").values()
                found = [r for r in runs if wanted.items() <= r.items()]
                assert len(found) >= 2, (claim["id"], check)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "bigger"}, "kind='bigger'; allowed are"),
        ({"metrics": "kl"}, "a check of kind greater has a, b, metric, got a, b, metric, metrics"),
    ],
)
def test_a_check_that_cannot_be_made_is_refused(change, words, tmp_path):
    content = yaml.safe_load(CLAIMS.read_text())
    claim = next(c for c in content["claims"] if c["id"] == "C7")
    claim["checks"][0] |= change
    path = tmp_path / "claims.yaml"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(FileError, match=words):
        read_claims(path)


def test_a_lacking_rule_is_named(tmp_path):
    content = yaml.safe_load(CLAIMS.read_text())
    del content["claims"][0]["rule"]
    path = tmp_path / "claims.yaml"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(FileError, match="claim C1: rule missing"):
        read_claims(path)


# The command


def test_the_command_prints_verdict_rule_and_effect(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    record(tmp_path, [(K1, 0.9, {}), (K3, 0.7, {})])
    assert cli.main(["claims", "C7", "C8", "--runs-dir", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "C7  reproduced" in out and "C8  not yet run" in out and "Rule: " in out
    assert "0.200" in out and "on_policy at cpu" in out


def test_an_unknown_claim_is_refused(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert cli.main(["claims", "C99"]) == 2
    assert "no claim C99; there are C1, C2" in capsys.readouterr().err


def test_the_exact_claims_are_judged_by_the_recorded_tables():
    table = findings_table(judge_claims(CLAIMS, ROOT / "data/runs", ["C1"]))
    assert set(table.verdict) == {"reproduced"} and (table.runs == 5).all()
