"""What this machine or a reward cannot satisfy is refused before any process of the run starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl.config.run_config import load_config
from asyncrl.cores import usable_cores
from asyncrl.errors import RewardError, UserError
from asyncrl.launch.gpus import Gpu, TorchBuild
from asyncrl.rewards.config import RewardConfig
from asyncrl.startup import devices
from asyncrl.startup.model_checks import check_builtin_positions, check_positions
from asyncrl.startup.preflight import check_machine, check_rewards

CORES = usable_cores()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (f"launcher.threads={CORES + 1}", f"^launcher.threads: {CORES + 1} is more than the"),
        (f"engine.threads={CORES + 1}", "^engine.threads: "),
        (f"trainer.threads={CORES + 1}", "^trainer.threads: "),
        (
            "engine={kind: sglang, sglang: {python: /no/python}}",
            "^engine.sglang.python: /no/python does not exist.*setup-sglang",
        ),
        (
            f"launcher={{pin_cores: true, generators: {CORES}}}",
            rf"^launcher.pin_cores: {CORES} generator\(s\) and a trainer .* need {CORES + 1} cores",
        ),
    ],
)
def test_a_machine_that_is_too_small(override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_machine(load_config(None, [override]))
    check_machine(load_config(None, []))


def test_what_a_compiler_is_needed_for_is_refused_without_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = load_config(None, ["trainer.compile=true"])
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"^trainer.compile: true needs a C\+\+ compiler.*apt-get"):
        check_machine(config)
    (tmp_path / "c++").touch(mode=0o755)
    check_machine(config)


def test_a_gpu_to_share_is_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "find_gpus", list)
    with pytest.raises(UserError, match=r"^launcher.colocate: true has an effect only where"):
        check_machine(load_config(None, ["launcher.colocate=true"]))
    check_machine(load_config(None, ["launcher.colocate=false"]))


def test_the_compiler_is_that_of_the_devices_that_the_run_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A machine with GPUs: Triton's C compiler, unless the run may use none of them."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(devices, "torch_build", lambda: TorchBuild("2.9.0", "12.8"))
    monkeypatch.setattr(devices, "find_gpus", lambda: [Gpu("0", "GPU-a"), Gpu("1", "GPU-b")])
    with pytest.raises(UserError, match=r"^trainer.compile: true needs a C compiler"):
        check_machine(load_config(None, ["trainer.compile=true"]))
    for override in ("launcher.gpus=[]", "trainer.device=cpu"):
        with pytest.raises(UserError, match=r"^trainer.compile: true needs a C\+\+ compiler"):
            check_machine(load_config(None, ["trainer.compile=true", override]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UserError, match=r"^trainer.compile: true needs a C\+\+ compiler"):
        check_machine(load_config(None, ["trainer.compile=true"]))


def test_a_broken_nvidia_smi_does_not_refuse_a_run_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, text in (("nvidia-smi", "#!/bin/sh\nexit 9\n"), ("c++", "")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    check_machine(load_config(None, ["trainer.compile=true", "launcher.gpus=[]"]))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ({"name": "exact_mach"}, "Did you mean 'exact_match'"),
        ({"name": "format"}, "'format' cannot be called as .*missing a required.*'pattern'"),
        ({"name": "exact_match", "args": {"case": 1}}, "unexpected keyword argument 'case'"),
        ({"name": "no_such_module_here:f"}, "there is no module 'no_such_module_here'"),
        ({"name": "FILE:nothing"}, "has no 'nothing'. Did you mean"),
        ({"name": "FILE:two"}, "cannot be called as function"),
        ({"name": "FILE:three", "args": {"scale": 2}}, "unexpected keyword argument 'scale'"),
        ({"name": "BROKEN:f"}, r"(?s)loading the rewards .*ZeroDivisionError"),
    ],
)
def test_a_reward_that_cannot_be_called(
    tmp_path: Path, function: dict[str, object], message: str
) -> None:
    mine, broken = tmp_path / "mine.py", tmp_path / "broken.py"
    mine.write_text(
        "def two(prompt, response): ...\ndef three(prompt, response, example): return 1\n"
        "def anything(prompt, response, example): return 1\n"
    )
    broken.write_text("1 / 0\n")
    name = str(function["name"]).replace("FILE", str(mine)).replace("BROKEN", str(broken))
    config = RewardConfig.model_validate({"functions": [function | {"name": name}]})
    with pytest.raises(RewardError, match=message):
        check_rewards(config)
    check_rewards(RewardConfig.model_validate({"functions": [{"name": f"{mine}:three"}]}))
    check_rewards(RewardConfig())


@pytest.mark.parametrize("kind", ["torch", "vllm"])
def test_sequences_longer_than_the_built_in_model_reads_are_refused_before_it_is_made(
    kind: str,
) -> None:
    config = load_config(None, ["engine.max_model_len=513", f"engine.kind={kind}"])
    with pytest.raises(UserError, match=r"^engine.max_model_len: 513 .*builtin:arithmetic .* 512;"):
        check_builtin_positions(config)
    check_builtin_positions(load_config(None, ["engine.max_model_len=512"]))


def test_sequences_longer_than_a_model_reads_are_refused_before_a_process_starts(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text('{"text_config": {"max_position_embeddings": 256}}')
    sets = [f"model.path={tmp_path}", "engine.max_model_len=300"]
    with pytest.raises(UserError, match=r"^engine.max_model_len: 300 tokens .* 256;"):
        check_positions(load_config(None, sets), tmp_path)
    check_positions(load_config(None, [*sets, "engine.kind=vllm"]), tmp_path)  # has its own rules
    check_positions(load_config(None, sets), tmp_path / "an-id-of-the-hub")


@pytest.mark.parametrize(
    ("described", "longest"),
    [
        ({"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 64}, 64),
        ({"rope_scaling": {"type": "su"}, "original_max_position_embeddings": 64}, 64),
        (
            {"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 64}},
            64,
        ),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, 256),
        ({"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}}, 256),
        ({"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 64}}, None),
        ({"rope_scaling": None}, None),
    ],
    ids=str,
)
def test_positions_that_depend_on_a_batch_are_refused(
    tmp_path: Path, described: dict[str, object], longest: int | None
) -> None:
    whole = {"max_position_embeddings": 256, **described}
    (tmp_path / "config.json").write_text(json.dumps(whole))

    def check(tokens: int) -> None:
        lengths = [f"engine.max_model_len={tokens}", "sampling.max_tokens=16"]
        sets = [f"model.path={tmp_path}", *lengths, "engine.kind=vllm"]
        check_positions(load_config(None, sets), tmp_path)

    if longest is None:
        check(1024)
        return
    check(longest)
    with pytest.raises(
        UserError, match=f"{longest + 1} tokens the positions.*set it to {longest},"
    ):
        check(longest + 1)


def test_a_judge_that_does_not_answer_is_refused_before_the_run() -> None:
    args = {
        "base_url": "http://127.0.0.1:1/v1",
        "model": "m",
        "template": "{response}",
        "score_pattern": "(.)",
        "attempts": 1,
    }
    config = RewardConfig.model_validate({"functions": [{"name": "judge", "args": args}]})
    for _ in range(2):  # each in an event loop of its own
        with pytest.raises(
            UserError, match=r"trial question was not answered, so .*127\.0\.0\.1:1/v1"
        ):
            check_rewards(config)
