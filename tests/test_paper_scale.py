"""The paper's scale: its settings, its cost, and its path, on a model that is large in nothing."""

import json
import warnings
from pathlib import Path

import pandas as pd
import papermill
import pytest
import torch
from sources import math2_of_the_hub, mmlu_of_the_hub
from toy import write_notebook
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer
from trl.data_utils import apply_chat_template

from kl_comedy.cli import main
from kl_comedy.policies.evaluation import evaluate
from kl_comedy.policies.policy import end_tokens, load_policy
from kl_comedy.policies.sampling import encode, sample_completions
from kl_comedy.study import cost, gpu_plan, training
from kl_comedy.study.checkpoints import COMPLETE, keep_policy, resume_point
from kl_comedy.study.exam import Exam, TrainedTest
from kl_comedy.study.jobs import Job, run_all
from kl_comedy.study.parameters import SweepError
from kl_comedy.study.recorder import Recorder
from kl_comedy.study.recorder import train as fit
from kl_comedy.study.runs import Run
from kl_comedy.study.sweeps import load_sweep, plan
from kl_comedy.study.tables import collect
from kl_comedy.tasks.characters import TASKS
from kl_comedy.tasks.dataset import problems, reward, stream, to_dataset
from kl_comedy.tasks.math import MATH, MATH_REQUEST, math_prompt, with_text_prompt
from kl_comedy.tasks.mmlu import SUBJECTS, mmlu_prompt
from kl_comedy.theory.config import KLConfig

ROOT = Path(__file__).resolve().parent.parent
QWEN, LLAMA = "Qwen/Qwen2.5-7B", "meta-llama/Llama-3.1-8B-Instruct"
BOXES = [r"\boxed{1}", r"\boxed{2}", r"\boxed{B}"]
ROWS = [("What is $2-1$?", "1"), ("What is $1+1$?", "2"), ("Halve $4$.", "2"), ("Halve $2$.", "1")]
HARDER = [("Halve $1+1$.", "$1$"), ("Halve $1+2+1$.", "$2$")]
CHOICES = [
    ("Halve $4$.", [*"1234"], "B"),
    ("Halve $2$.", [*"1234"], "A"),
    ("Is it?", [*"onib"], "B"),
]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def sweep(name):
    return load_sweep(ROOT / f"data/sweeps/{name}.yaml", ROOT)


# The settings


def test_the_presets_are_the_papers():
    runs = pd.DataFrame(plan(sweep("on_policy"), "paper").values())
    same = {
        "task": "math",
        "prompts_per_step": 256,
        "group_size": 5,
        "max_length": 1024,
        "learning_rate": 1e-6,
        "final_samples": 32,
        "minibatches": 1,
        "importance": "none",
    }
    assert {name: set(runs[name]) for name in same} == {name: {v} for name, v in same.items()}
    assert runs.test_source.eq("HuggingFaceH4/MATH-500").all() and runs.eval_problems.eq(500).all()
    assert runs.math2_source.eq("veds12/math-squared").all()
    assert runs.mmlu_source.eq("cais/mmlu").all()
    cells = runs.groupby(["policy", "placement", "estimator", "steps"]).agg(
        {"beta": lambda b: sorted(set(b)), "seed": lambda s: sorted(set(s))}
    )
    betas = [0.05, 0.1, 0.3, 1.0]
    expected = {
        (model, placement, estimator, 250): b
        for model in (QWEN, LLAMA)
        for placement, estimator, b in (
            ("none", "k1", [0.0]),
            ("loss", "k1", betas),
            ("reward", "k3", betas),
            ("loss", "k3", betas),
            ("reward", "k1", betas),
        )
    }
    expected |= {(QWEN, "both", estimator, 150): [0.1] for estimator in ("k1", "k3")}
    assert cells.beta.to_dict() == expected and all(s == [0, 1, 2] for s in cells.seed)


def test_the_minibatches_are_the_papers():
    runs = pd.DataFrame(plan(sweep("variants"), "paper").values())
    assert set(runs.policy) == {QWEN} and set(runs.minibatches * runs.prompts_per_step) == {1024}
    assert set(runs.prompts_per_step) == {256} and set(runs.steps % runs.minibatches) == {0}
    assert set(zip(runs.estimator, runs.placement, strict=True)) == {
        ("k1", "none"),
        ("k1", "reward"),
        ("k1", "loss"),
        ("k3", "reward"),
    }


@pytest.mark.parametrize("name", [p.name for p in sorted((ROOT / "data/runs").iterdir())])
def test_recorded_runs_are_still_runs_of_their_sweep(name):
    """A parameter that is new in a notebook must not give a recorded run another name."""
    recorded = pd.read_csv(ROOT / "data/runs" / name / "runs.csv")
    (scale,) = set(recorded.scale)
    assert list(recorded.run) == list(plan(sweep(name), scale))


# The cost


@pytest.mark.parametrize(
    "policy, billions, cache", [(QWEN, 7.6, 28 * 2 * 4 * 128), (LLAMA, 8.0, 32 * 2 * 8 * 128)]
)
def test_the_models_have_their_published_size(policy, billions, cache):
    model = cost.model_of(policy, ROOT)
    assert round(model.parameters / 1e9, 1) == billions and model.cache == cache


def test_memory_and_hours_go_with_what_they_depend_on():
    model = cost.model_of(QWEN, ROOT)
    run = plan(sweep("on_policy"), "paper").values()
    run = next(r for r in run if r["placement"] == "reward")

    def need(**changes):
        return sum(cost.memory(model, run | changes, cost.B200).values()) / 1e9

    def hours(**changes):
        return cost.work(model, run | changes, cost.B200)["hours"]

    weights = model.parameters * 4 / 1e9
    assert 5 * 1.05 * weights < need() < 6 * weights
    assert need(dtype="bfloat16") == pytest.approx(need() / 2, rel=0.1)
    assert need(gradient_checkpointing=False) > need() and need(rows=16) > need()
    assert need(draw_rows=1280) > need()
    assert need(use_vllm=True, vllm_gpu_memory_utilization=0.4) - need() > 0.3 * 192
    assert need(estimator="exact", placement="both") > need()
    assert hours(steps=500) > 1.8 * hours() and hours(placement="none") < hours(placement="loss")
    assert hours(placement="loss") < hours() and hours(draw_rows=8) > hours()
    trained = cost.work(model, run, cost.B200)["trained"]
    assert trained == 250 * 256 * 5 * 1024
    drawn = [
        cost.work(model, run | {"math2_source": a, "mmlu_source": b}, cost.B200)["drawn"]
        for a, b in ((None, None), ("x", None), (None, "x"))
    ]
    assert [n - drawn[0] for n in drawn[1:]] == [210 * 32 * 1024, 346 * 32 * 1024]
    assert hours() > hours(math2_source=None) > hours(math2_source=None, mmlu_source=None)


def test_the_plan_is_printed_and_refused_without_a_gpu(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(gpu_plan, "gpus", list)
    request = ["reproduce", "on_policy", "--scale", "paper", "--runs-dir", str(tmp_path / "runs")]
    assert main(request) == 2
    out, err = capsys.readouterr()
    assert out.count(QWEN) == 4 and out.count(LLAMA) == 3 and "an assumption" in out
    assert err.startswith("kl_comedy: on_policy at this scale: no GPU is here; needed are 1 with ")
    assert err.count("\n") == 1
    assert main([*request, "--plan"]) == 0
    alone, err = capsys.readouterr()
    assert alone.startswith(out) and "on_policy: 108 runs at scale paper" in alone and err == ""
    monkeypatch.setattr(gpu_plan, "gpus", lambda: [("0", 141e9), ("1", 141e9)])
    assert main(request) == 2
    assert "GB, and a GPU here has 141" in capsys.readouterr().err
    assert main([*request, "--jobs", "3"]) == 2
    assert "jobs must be at most 2, the GPUs that are here" in capsys.readouterr().err
    assert main([*request, "--record"]) == 2
    assert "on_policy cannot be recorded at scale paper" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "changed, words",
    [
        ({"rows": 7}, "rows must be a divisor of the 1280 responses of a step, got 7"),
        ({"save_steps": 0}, "save_steps must be a positive multiple of minibatches=1, got 0"),
        ({"estimator": "k4"}, "estimator='k4'"),
        ({"estimator": "exact", "beta": -1.0}, "beta=-1.0"),
        ({"task": None, "source": None}, "math2_source must be given for the task math"),
    ],
)
def test_a_run_that_cannot_be_made_is_refused_before_its_cost(changed, words):
    run = next(iter(plan(sweep("on_policy"), "paper").values()))
    gpu_plan.check_run("here", run)
    with pytest.raises(SweepError, match=f"^here: .*{words}"):
        gpu_plan.check_run("here", run | changed)


def test_a_new_character_task_is_planned_and_tested(monkeypatch):
    run = next(iter(plan(sweep("on_policy"), "quick").values()))
    before = cost.load_of(run).tested
    samples = before // run["eval_problems"] // len(TASKS)
    monkeypatch.setitem(TASKS, "copy", TASKS["reverse"])
    assert cost.load_of(run).tested - before == run["eval_problems"] * samples
    gpu_plan.check_run("here", run | {"task": "copy"})
    with pytest.raises(SweepError, match="task must be sum, .*, copy, math or null, got 'cop'"):
        gpu_plan.check_run("here", run | {"task": "cop"})


def test_a_plan_without_gpus_lists_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert main(["reproduce", "table1", "--plan", "--runs-dir", str(tmp_path / "runs")]) == 0
    assert capsys.readouterr().out == "table1: 1 runs at scale quick\n"
    assert not (tmp_path / "runs").exists()


def test_every_run_has_a_gpu_to_itself(tmp_path):
    write_notebook(
        tmp_path / "n.ipynb",
        [
            "import os\nimport time\nfrom kl_comedy.study.runs import Run",
            "run_dir = None",
            "time.sleep(1)\nRun(run_dir).finish(gpu='GPU ' + os.environ['CUDA_VISIBLE_DEVICES'])",
        ],
    )
    jobs = [
        Job(
            "toy",
            f"s{i}",
            tmp_path / "n.ipynb",
            tmp_path / f"s{i}",
            {"run_dir": str(tmp_path / f"s{i}")},
            1,
        )
        for i in range(3)
    ]
    run_all([*jobs], 2, lambda job: [], print, ["2", "5"])
    used = [json.loads((job.folder / "status.json").read_text())["gpu"] for job in jobs]
    assert set(used[:2]) == {"GPU 2", "GPU 5"} and used[2] in used[:2]


# The path


def micro_policy(folder, template=TEMPLATE):
    """A Qwen2 of one layer that reads the prompts; three of its tokens are whole answers."""
    asked = [mmlu_prompt(text, choices)[0]["content"] for text, choices, _ in CHOICES]
    texts = [text for text, _ in ROWS + HARDER] + [MATH_REQUEST, "systemuserassistant\n", *asked]
    characters = sorted(set("".join(texts)))
    symbols = ["<|endoftext|>", *(c.replace(" ", "Ġ").replace("\n", "Ċ") for c in characters)]
    tok = Qwen2Tokenizer(
        vocab={s: i for i, s in enumerate(symbols)},
        merges=[],
        unk_token=None,
        pad_token="<|endoftext|>",
        eos_token="<|endoftext|>",
    )
    tok.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tok.add_tokens(BOXES)
    tok.chat_template = template
    config = Qwen2Config(
        vocab_size=1200,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=16,
        tie_word_embeddings=False,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(config)
    with torch.no_grad():  # answers are likely: all its states have a part in common with them
        model.model.embed_tokens.weight += 1
        model.lm_head.weight[tok.convert_tokens_to_ids([*BOXES, "<|im_end|>"])] += 0.4
    model.save_pretrained(folder)
    tok.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return micro_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("math")
    for split in ("train", "test"):
        for i, (problem, answer) in enumerate(ROWS):
            path = folder / split / "algebra" / f"{i}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(
                json.dumps(
                    {
                        "problem": problem,
                        "level": "Level 1",
                        "type": "Algebra",
                        "solution": f"It is $\\boxed{{{answer}}}$.",
                    }
                )
            )
    return str(folder)


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def test_a_conversation_is_written_as_trl_writes_it(policy, source):
    _, tok = load_policy(policy)
    asked = problems(MATH, "test", 4, source=source)
    found = encode(tok, [p.prompt for p in asked])
    for problem, ids, mask in zip(asked, found.input_ids, found.attention_mask, strict=True):
        theirs = apply_chat_template({"prompt": problem.prompt}, tok)["prompt"]
        assert tok.decode(ids[mask.bool()]) == theirs and theirs.endswith("assistant\n")


def test_a_turn_that_closes_ends_a_response(policy, source):
    model, tok = load_policy(policy)
    ends = tok.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    assert end_tokens(model, tok) == sorted(ends) and model.generation_config.eos_token_id == 0
    asked = problems(MATH, "test", 4, source=source)
    found = evaluate(model, tok, asked, 8, 0, max_new_tokens=12, batch_size=5)
    assert 1 < found["length"] < 12 and 0 < found["truncated"] < 1
    assert 0 < found["pass_at_1"] < 1 and found["verdicts"]["right"] == found["pass_at_1"] * 32


def test_without_a_template_prompts_are_refused_or_plain(source, tmp_path):
    model, tok = load_policy(micro_policy(tmp_path, None))
    asked = problems(MATH, "test", 2, source=source)
    with pytest.raises(ValueError, match="no chat template.*with_text_prompt"):
        sample_completions(model, tok, asked, 1, 0)
    plain = [with_text_prompt(problem) for problem in asked]
    assert plain[0].prompt == asked[0].prompt[0]["content"] + "\n\n" and plain[0].gold
    texts = sample_completions(model, tok, plain, 2, 0, max_new_tokens=7)
    assert all(len(tok(t)["input_ids"]) <= 7 for pair in texts for t in pair)


def test_half_precision_is_measured_in_float32(policy, source):
    asked = problems(MATH, "test", 4, source=source)
    found = [
        evaluate(
            *load_policy(policy, dtype),
            asked,
            4,
            0,
            max_new_tokens=8,
            ref_model=load_policy(policy, dtype)[0],
        )
        for dtype in ("float32", "bfloat16")
    ]
    assert [f["kl"] for f in found] == [0, 0]
    assert found[0]["entropy"] == pytest.approx(found[1]["entropy"], rel=0.05)


def train(folder, policy, source, steps=3, stop=None, **settings):
    model, tok = load_policy(policy)
    run, data = Run(folder), to_dataset(stream(MATH, "train", 3 * 2, 0, source))
    trainer = training.build_trainer(
        KLConfig("k1", "reward", 0.1),
        model,
        tok,
        data,
        reward,
        f"{folder}/checkpoint",
        training.TrainSettings(
            seed=0,
            learning_rate=1e-2,
            warmup_steps=0,
            prompts_per_step=2,
            group_size=3,
            max_length=8,
            save_steps=1,
            **({"rows": 2, "draw_rows": 4} | settings),
        ),
    )
    asked = problems(MATH, "test", 4, source=source)
    own = TrainedTest(tok, trainer.ref_model, asked, 1, 0, max_new_tokens=8, batch_size=3)
    recorder = Recorder(run, Exam(MATH, own, {}), 1)
    trainer.add_callback(recorder)
    if stop:  # killed in step 3, while checkpoint 2 was being marked

        def on_step_begin(args, state, control, **_):
            if state.global_step == stop:
                raise KeyboardInterrupt

        recorder.on_step_begin = on_step_begin
    fit(trainer, recorder, resume_point(run, f"{folder}/checkpoint"))
    return run.metrics().drop(columns="step_time")


def test_a_run_on_math_resumes_to_the_same_numbers(policy, source, tmp_path):
    whole = train(tmp_path / "whole", policy, source)
    assert whole.step.tolist() == [0, 1, 2, 3] and whole.kl[3] > 0 == whole.kl[0]
    assert whole.reward[1:].between(0, 1).all() and 0 < whole.reward[1:].mean() < 1
    assert (whole.no_box[1:] + whole.reward[1:] < 1.001).all() and whole.timeout[1:].eq(0).all()
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "cut", policy, source, stop=2)
    (tmp_path / "cut/checkpoint/checkpoint-2" / COMPLETE).unlink()
    pd.testing.assert_frame_equal(train(tmp_path / "cut", policy, source), whole, check_exact=True)


def test_what_is_kept_of_a_finished_run_is_the_last_policy(policy, source, tmp_path):
    train(tmp_path, policy, source)
    keep_policy(tmp_path / "checkpoint")
    (kept,) = (tmp_path / "checkpoint").glob("checkpoint-*")
    assert kept.name == "checkpoint-3" and not [*kept.glob("optimizer*")]
    model, _ = load_policy(kept)
    start, _ = load_policy(policy)
    assert not torch.equal(model.lm_head.weight, start.lm_head.weight)
    assert resume_point(Run(tmp_path), tmp_path / "checkpoint") is None


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"rows": 4}, "rows=4: a divisor of the 6 responses"),
        ({"rows": 0}, "rows must be 1 or more, or None, got 0"),
        ({"draw_rows": "all"}, "draw_rows must be 1 or more, or None, got 'all'"),
    ],
)
def test_parts_that_do_not_fit_are_refused(policy, source, tmp_path, settings, words):
    with pytest.raises(ValueError, match=words):
        train(tmp_path, policy, source, **settings)


def test_settings_of_vllm_reach_trl(policy, source, tmp_path, monkeypatch):
    seen = {}
    monkeypatch.setattr(training, "RLOOConfig", lambda *_, **given: seen.update(given) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(
            tmp_path,
            policy,
            source,
            bf16=True,
            gradient_checkpointing=True,
            vllm={"use_vllm": True, "vllm_mode": "colocate"},
        )
    assert seen["use_vllm"] is True and seen["vllm_mode"] == "colocate" and seen["bf16"] is True
    assert seen["per_device_train_batch_size"] == 2 and seen["gradient_accumulation_steps"] == 3


@pytest.fixture(scope="module")
def sources(source, tmp_path_factory):
    """Where each kind of problems of a run is read from: folders in the formats of the hub."""
    folder = tmp_path_factory.mktemp("tests")
    return {
        "source": source,
        "test_source": source,
        "math2_source": str(math2_of_the_hub(folder / "math2", ["Question", "Answer"], HARDER)),
        "mmlu_source": str(mmlu_of_the_hub(folder / "mmlu", CHOICES)),
    }


def small(policy, sources):
    """The sizes of a run of the paper's scale, made small, on a model and data on disk."""
    return {
        "policy": policy,
        **sources,
        "steps": 2,
        "prompts_per_step": 2,
        "max_length": 8,
        "learning_rate": 1e-3,
        "eval_every": 1,
        "eval_problems": 4,
        "final_samples": 2,
        "base_samples": 2,
        "save_steps": 1,
        "rows": 5,
    }


def test_the_notebook_of_the_paper_scale_trains_a_model_on_disk(policy, sources, tmp_path):
    """The preset of the sweep, all but its sizes: the same keys, the same path."""
    preset = next(
        run
        for run in plan(sweep("on_policy"), "paper").values()
        if (run["estimator"], run["placement"]) == ("k1", "reward")
    )
    papermill.execute_notebook(
        ROOT / "nbs/experiments/20_on_policy.ipynb",
        tmp_path / "out.ipynb",
        preset | small(policy, sources) | {"run_dir": str(tmp_path)},
        progress_bar=False,
        cwd=ROOT / "nbs/experiments",
    )
    status = json.loads((tmp_path / "status.json").read_text())
    assert status["state"] == "done" and 0 <= status["final_pass_math"] <= 1
    metrics = Run(tmp_path).metrics()
    assert metrics.step.tolist() == [0, 1, 2]
    assert {"pass_math", "test_no_box", "test_undecided", "kl", "reward", "no_box"} <= {*metrics}
    base = pd.read_csv(tmp_path / "base_pass_rates.csv")
    assert (
        base.prompt.str.endswith(MATH_REQUEST + "\n\n").all() and base.pass_rate.between(0, 1).all()
    )
    assert math_prompt(ROWS[0][0])[0]["content"] + "\n\n" in set(base.prompt)
    late = [f"pass_{name}" for name in ("math2", *SUBJECTS, "in", "out")]  # of the end alone
    assert metrics[late].notna().all(axis=1).tolist() == [False, False, True]
    assert metrics[late].isna().all(axis=1).tolist() == [True, True, False]
    ends = {name: status[f"final_{name}"] for name in [*late, "pass_math"]}
    assert ends["pass_in"] == pytest.approx((ends["pass_math"] + ends["pass_math2"]) / 2)
    assert ends["pass_out"] == pytest.approx(sum(ends[f"pass_{name}"] for name in SUBJECTS) / 3)
    rates = pd.read_csv(tmp_path / "final_rates.csv").set_index("task").rates.map(json.loads)
    assert rates.map(len).to_dict() == {"math": 4, "math2": 2, **dict.fromkeys(SUBJECTS, 3)}
    for name in rates.index:
        assert sum(rates[name]) / len(rates[name]) == pytest.approx(ends[f"pass_{name}"])
    assert set(sum(rates, [])) <= {0, 0.5, 1} and sum(sum(rates, [])) > 0


def test_tests_of_other_tasks_than_math_are_refused(sources, tmp_path):
    with pytest.raises(papermill.PapermillExecutionError, match="are for the task math, got 'sum'"):
        papermill.execute_notebook(
            ROOT / "nbs/experiments/20_on_policy.ipynb",
            tmp_path / "out.ipynb",
            {"mmlu_source": sources["mmlu_source"], "run_dir": str(tmp_path)},
            progress_bar=False,
            cwd=ROOT / "nbs/experiments",
        )


def is_made(run):
    """One of the few runs of a preset that are made small to be drawn."""
    return (
        run["beta"] in (0, 0.1)
        and run["seed"] == 0
        and run["policy"] == QWEN
        and run["placement"] + run["estimator"] in ("nonek1", "lossk1")
    )


@pytest.fixture(scope="module")
def tables(policy, sources, tmp_path_factory):
    """The tables of two configurations of both presets, made small."""
    folder = tmp_path_factory.mktemp("tables")
    changed = {"on_policy": {}, "variants": {"steps": 8, "save_steps": 4, "learning_rate": 1e-2}}
    for name, sizes in changed.items():
        jobs = [
            Job(
                name,
                run,
                ROOT / "nbs/experiments/20_on_policy.ipynb",
                folder / run,
                parameters | small(policy, sources) | sizes | {"run_dir": str(folder / run)},
                1,
            )
            for run, parameters in plan(sweep(name), "paper").items()
            if is_made(parameters)
        ]
        assert len(jobs) == 2
        run_all([*jobs], 1, lambda job: [], print)
        collect([job.folder for job in jobs], folder / name / "paper", "paper")
    return folder


def drawn(name, tables, policy, folder):
    """The table that a gallery notebook writes about the runs of the sweep `name`."""
    gallery = sweep(name).gallery
    papermill.execute_notebook(
        gallery,
        folder / "out.ipynb",
        {"runs_dir": str(tables / name / "paper"), "out_dir": str(folder), "policy": policy},
        progress_bar=False,
        cwd=gallery.parent,
    )
    return pd.read_csv(folder / f"{name}.csv")


def test_the_gallery_draws_runs_on_math(policy, tables, tmp_path):
    """The cells that draw the recorded study draw runs at the paper's scale."""
    table = drawn("on_policy", tables, policy, tmp_path)
    assert {"K1 in loss", "no KL"} == set(table.configuration)
    tests = ["math", "math2", *SUBJECTS, "in", "out"]
    assert table[[f"pass_{name}" for name in tests]].stack().between(0, 1).all()
    assert (tmp_path / "on_policy_beta_0.1.png").exists()
    assert (tmp_path / "on_policy_tests.png").exists()


def test_the_gallery_draws_variants_on_math(policy, tables, tmp_path):
    """Beside the runs of the study with the same policy, seed and beta."""
    table = drawn("variants", tables, policy, tmp_path)
    assert set(zip(table.configuration, table.setting, table.runs, strict=True)) == {
        (label, setting, 1)
        for label in ("K1 in loss", "no KL")
        for setting in ("on-policy, not clipped", "4 minibatches")
    }
    assert table[["pass_math", "pass_in", "pass_out"]].stack().between(0, 1).all()
    assert (tmp_path / "variants.png").exists()
    with pytest.raises(papermill.PapermillExecutionError, match="policy='nobody': one of .* is"):
        drawn("variants", tables, "nobody", tmp_path)
