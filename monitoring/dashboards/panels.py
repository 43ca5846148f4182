"""The dashboard's panels, in reading order; queries are built from declared metrics only."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.monitoring.metrics.controller_metrics import ControllerMetrics
from asyncrl.monitoring.metrics.instruments import MetricSpec, specs_of
from asyncrl.monitoring.metrics.metrics import GeneratorMetrics, TrainerMetrics
from asyncrl.monitoring.metrics.process_metrics import ProcessMetrics

RUN = 'run=~"$run"'
"""Selects the runs that are chosen at the top of the dashboard."""
WINDOW = "$__rate_interval"
"""Grafana's window: four scrapes or one pixel, whichever is longer."""


@dataclass(frozen=True, slots=True)
class Series:
    """One declared metric, as PromQL."""

    spec: MetricSpec
    matchers: tuple[str, ...] = ()

    def __str__(self) -> str:
        """The instant vector."""
        return self._selected(self.spec.name)

    def where(self, **labels: str) -> Series:
        """Select series by labels, which may be patterns. Raises ValueError for unknown labels."""
        for label in labels:
            if label not in ("process", *self.spec.labels):
                raise ValueError(f"{label} is not a label of {self.spec.name}")
        more = tuple(f'{label}=~"{value}"' for label, value in labels.items())
        return Series(self.spec, self.matchers + more)

    @property
    def rate(self) -> str:
        """Growth of a counter per second."""
        return f"rate({self}[{WINDOW}])"

    def quantile(self, share: float) -> str:
        """A quantile of a histogram, over a run's processes. Raises ValueError otherwise."""
        if self.spec.kind != "histogram":
            raise ValueError(f"{self.spec.name} is not a histogram")
        buckets = self._selected(f"{self.spec.name}_bucket")
        return f"histogram_quantile({share}, sum by (run, le) (rate({buckets}[{WINDOW}])))"

    def mean(self) -> str:
        """Mean of a histogram's values, over a run's processes. Raises ValueError otherwise."""
        if self.spec.kind != "histogram":
            raise ValueError(f"{self.spec.name} is not a histogram")
        total, count = (self._selected(f"{self.spec.name}_{part}") for part in ("sum", "count"))
        rates = (f"sum by (run) (rate({one}[{WINDOW}]))" for one in (total, count))
        return " / ".join(rates)

    def _selected(self, name: str) -> str:
        return f"{name}{{{', '.join((RUN, *self.matchers))}}}"


def series_of(role: type[ProcessMetrics]) -> dict[str, Series]:
    """The declared metrics of a role, by field."""
    return {field: Series(spec) for field, spec in specs_of(role)}


C, G, T = map(series_of, (ControllerMetrics, GeneratorMetrics, TrainerMetrics))


@dataclass(frozen=True, slots=True)
class Query:
    """One line of a panel, or one line per label value."""

    series: Series | str
    legend: str
    """May use Grafana's `{{label}}`."""
    unit: str | None = None
    """Unit of a line with its own axis, on the right; by default the panel's."""

    @property
    def expr(self) -> str:
        """The line as PromQL."""
        return str(self.series)


@dataclass(frozen=True, slots=True)
class Panel:
    """One graph over time."""

    title: str
    shows: str
    if_wrong: str
    """The remedy: one or two sentences."""
    unit: str
    queries: tuple[Query, ...]
    stacked: bool = False
    """True if lines are areas on top of each other."""


def _panel(
    title: str, shows: str, remedy: str, *queries: Query, unit: str = "short", stacked: bool = False
) -> Panel:
    return Panel(title, shows, remedy, unit, queries, stacked)


def _summed(series: Series | str, *labels: str) -> str:
    return f"sum by ({', '.join(('run', *labels))}) ({series})"


LEARNING = (
    _panel(
        "Reward",
        "Mean reward of each step's samples, its standard deviation, and what each reward "
        "function returned.",
        "It should rise within the first hundred steps. Flat: look at the share of groups without "
        "signal, then at the learning rate. Falling: at the KL and the rejected share.",
        Query(C["reward_mean"], "mean"),
        Query(C["reward_std"], "standard deviation"),
        Query(C["reward_terms"], "{{function}}"),
    ),
    _panel(
        "Held-out accuracy",
        "Share of right samples on held-out prompts before, during and after training, and that of "
        "each set in the newest evaluation.",
        "If it falls while the reward rises, the policy has learnt the reward and not the task: "
        "read samples/.",
        Query(C["accuracy"], "{{when}}"),
        Query(C["set_accuracy"], "{{set}}"),
        unit="percentunit",
    ),
    _panel(
        "Loss and gradient norm",
        "Loss of each step, and the norm of its gradient before clipping.",
        "A norm that jumps tenfold precedes most collapses: lower the learning rate, or clip more.",
        Query(T["loss"], "loss"),
        Query(T["grad_norm"], "gradient norm"),
    ),
    _panel(
        "Entropy and KL",
        "Entropy of the policy per token, and how far it has moved since the tokens were drawn.",
        "Entropy near 0 ends exploration: raise the temperature, or add a KL penalty. A growing "
        "KL with staleness 0 means that engine and trainer disagree.",
        Query(T["entropy"], "entropy, nats"),
        Query(T["behaviour_kl"], "KL(behaviour, current), nats"),
    ),
    _panel(
        "Samples without use",
        "Share of samples cut off by the token limit or a deadline, and of groups in which all "
        "samples have the same reward; and what dynamic sampling left out.",
        "Cut off: raise sampling.max_tokens. No signal: prompts of another difficulty, or a larger "
        "group_size. Many left out with rewards zero: easier prompts; with equal ones: harder.",
        Query(T["truncated"], "cut off"),
        Query(T["zero_variance"], "groups without signal"),
        Query(C["groups_without_signal"].rate, "left out per second, {{rewards}}", "short"),
        Query(C["groups_left_over"].rate, "left over per second", "short"),
        unit="percentunit",
    ),
    _panel(
        "Response length",
        "Median and 95th percentile of the tokens of finished responses.",
        "Growth to the limit without growth of the reward is a length exploit: look at samples/.",
        Query(G["response_length"].quantile(0.5), "median"),
        Query(G["response_length"].quantile(0.95), "95 %"),
    ),
)

EXACTNESS = (
    _panel(
        "Staleness",
        "Age of the trained tokens in optimizer steps, mean and oldest.",
        "It never exceeds max_off_policy_steps, and is 0 with the default. Anything else is a "
        "defect: please report it.",
        Query(C["staleness_mean"], "mean"),
        Query(C["staleness_max"], "oldest token"),
    ),
    _panel(
        "On-policy steps and findings",
        "Steps that were exactly on-policy and that were not, and findings that a generator "
        "samples from another policy.",
        "Findings: docs/operate.md explains each cause. Steps that are not on-policy follow "
        "from max_off_policy_steps, a deadline, lenient reuse or a finding.",
        Query(C["on_policy_steps"], "exactly: {{exactly}}"),
        Query(_summed(C["wrong_policy"]), "findings"),
    ),
    _panel(
        "Engine against trainer",
        "Mean difference of a token's log-probability between engine and trainer under the same "
        "weights, and between drawing and verification in the engine.",
        "float32: about 1e-6; bfloat16: up to 0.01. More: look at engine.dtype and the engine's "
        "version.",
        Query(T["mismatch"], "trainer, nats"),
        Query(G["noise_floor_difference"], "{{process}}, nats"),
    ),
    _panel(
        "Verification",
        "Tokens of older policies that verification kept and rejected, and those rejected under "
        "unchanged weights.",
        "Rejected tokens are generated again. A share above 30 % means that the policy moves fast: "
        "lower the learning rate, or run less far ahead.",
        Query(_summed(G["verified_tokens"].rate), "kept"),
        Query(_summed(G["rejected_tokens"].rate), "rejected"),
        Query(_summed(G["noise_floor_rejected"].rate), "rejected by rounding alone"),
        stacked=True,
    ),
)

SPEED = (
    _panel(
        "Step time",
        "Mean time from one finished step to the next, the median of the last steps, and the "
        "trainer's part of it.",
        "The panels of idle time name what the rest waits for.",
        Query(C["step_time"].mean(), "step"),
        Query(C["step_median"], "median of the last steps"),
        Query(T["train_time"].mean(), "forward, backward, optimizer"),
        unit="s",
    ),
    _panel(
        "Tokens by origin",
        "Tokens per second: drawn one by one, accepted from drafts, kept by verification.",
        "If drawn tokens fall while slots are busy, the answers or the batch have grown: look at "
        "the KV space and the response length.",
        Query(
            f"{_summed(G['generated_tokens'].rate)} - {_summed(G['accepted_tokens'].rate)}", "drawn"
        ),
        Query(_summed(G["accepted_tokens"].rate), "accepted drafts"),
        Query(_summed(G["verified_tokens"].rate), "kept by verification"),
        stacked=True,
    ),
    _panel(
        "Draft acceptance",
        "Share of the tokens proposed by the cache that the policy accepted.",
        "It grows over the epochs. Below a third drafting hardly pays, and the draft budget "
        "shrinks by itself.",
        Query(
            f"{_summed(G['accepted_tokens'].rate)} / "
            f"({_summed(G['drafted_tokens'].rate)} > 0) or "
            f"0 * {_summed(G['drafted_tokens'].rate)}",
            "accepted",
        ),
        unit="percentunit",
    ),
    _panel(
        "Who is idle, and why",
        "Share of the last minute that each process spent waiting, by cause.",
        "rewards: more workers. new weights: more run-ahead. last group: long answers decide. "
        "more groups: generators are too slow for this trainer.",
        Query(C["idle_ratio"], "{{process}}: {{cause}}"),
        unit="percentunit",
    ),
    _panel(
        "What each process does",
        "Seconds per second, by process and kind of work.",
        "Much verifying or run_ahead and little generating: run-ahead is too long. Much "
        "transferring_weights: look at the weights panel.",
        Query(_summed(C["activity"].rate, "process", "kind") + " > 0", "{{process}}: {{kind}}"),
        unit="percentunit",
    ),
    _panel(
        "Use of slots",
        "Share of all slots, by what they are used for.",
        "Idle slots under long answers are what run-ahead is for: raise max_runahead_groups, or "
        "lower engine.slots.",
        Query(
            f"{_summed(G['slot_seconds'].rate, 'kind')} / on (run) group_left () "
            f"{_summed(G['slots'])}",
            "{{kind}}",
        ),
        unit="percentunit",
        stacked=True,
    ),
    _panel(
        "Phases",
        "How long the present phase of each process has lasted, and the median of such phases.",
        "A phase far above its median hangs: the alert names it, and `asyncrl status` what the "
        "run waits for.",
        Query(f"{C['phase']} > 0", "{{process}}: {{kind}}"),
        Query(f"{C['phase_median']} > 0", "{{process}}: {{kind}}, median"),
        unit="s",
    ),
)

FLOW = (
    _panel(
        "Samples in flight",
        "Samples between their start and training, by where they are, and those that generators "
        "hold until the trainer has them.",
        "Many held: their groups wait for one long answer or for rewards. Many queued: the "
        "trainer is the bottleneck.",
        Query(C["samples"], "{{state}}"),
        Query(_summed(G["samples_held"]), "held by generators"),
    ),
    _panel(
        "Requests and KV space",
        "Requests that hold a slot and that wait for one, and the share of the KV space in use.",
        "KV space near 100 % with requests waiting: fewer slots, a lower runahead_kv_limit, or "
        "more KV space.",
        Query(G["running"], "{{process}} running"),
        Query(G["waiting"], "{{process}} waiting"),
        Query(G["kv_used"], "{{process}} KV space", "percentunit"),
    ),
    _panel(
        "Rewards",
        "Median and 95th percentile of a reward call, queueing included, and samples that wait.",
        "Waiting samples that grow: more rewards.workers, or a faster function.",
        Query(G["reward_time"].quantile(0.5), "median"),
        Query(G["reward_time"].quantile(0.95), "95 %"),
        Query(_summed(G["rewards_waiting"]), "samples waiting", "short"),
        unit="s",
    ),
    _panel(
        "Environments",
        "95th percentile of an environment's calls, by method; samples that wait for an answer, "
        "or until one may be opened; samples that began again.",
        "step or reset slow: more environment.workers, or a faster environment. Samples that wait "
        "to be opened: more environment.sessions. Started over: give it restore or replay.",
        *(
            Query(G["environment_time"].where(method=method).quantile(0.95), f"{method}, 95 %")
            for method in ("reset", "step", "restore")
        ),
        Query(_summed(G["environment_waiting"]), "samples waiting", "short"),
        Query(_summed(G["environment_queued"]), "waiting to be opened", "short"),
        Query(_summed(G["environment_started_over"].rate), "started over per second", "short"),
        unit="s",
    ),
    _panel(
        "Weights",
        "Time to write one version, and how long generators pause to install it.",
        "A pause above a second: look at the disk or memory that the weights go through, and at "
        "the length of the engine's steps.",
        Query(T["publish_time"].mean(), "publish"),
        Query(G["weights_time"].mean(), "pause of a generator"),
        unit="s",
    ),
)

HEALTH = (
    _panel(
        "Processes",
        "Generators by state, and processes that died, by role.",
        "The terminal has the reason of each death. Repeated SIGKILL without a reason is usually "
        "the kernel's, for memory.",
        Query(C["generators"], "{{state}}"),
        Query(C["process_failures"], "{{role}}s that died"),
    ),
    _panel(
        "Memory",
        "Resident memory of each process; engines in processes of their own are not included.",
        "Steady growth is a leak: please report it, with the process's name.",
        Query(f"process_resident_memory_bytes{{{RUN}}}", "{{instance}}"),
        unit="bytes",
    ),
    _panel(
        "Errors",
        "Per second: reward calls without a reward, refused frames, failed checkpoints, samples "
        "that were sent again or not logged, and samples of failed groups.",
        "All of them should be 0. The alerts say what to do about each.",
        Query(
            f"{_summed(G['rewards_failed'].rate)} or 0 * {_summed(G['slots'])}", "rewards failed"
        ),
        Query(_summed(C["frames_refused"].rate), "frames refused"),
        Query(_summed(T["checkpoints_failed"].rate), "checkpoints failed"),
        Query(_summed(G["redeliveries"].rate), "sent again"),
        Query(_summed(T["unlogged_samples"].rate), "not logged"),
        Query(_summed(C["samples_ended"].where(outcome="failed").rate), "of failed groups"),
    ),
    _panel(
        "Checkpoints and disk",
        "Age of the newest checkpoint, and the free share of the run's disk.",
        "A lost trainer loses what is younger than its newest checkpoint. A full disk: remove old "
        "runs, or lower trainer.keep_checkpoints.",
        Query(f"time() - {T['checkpointed']}", "age of the newest checkpoint"),
        Query(f"{C['disk_free']} / {C['disk_size']}", "free share of the disk", "percentunit"),
        unit="s",
    ),
)

ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    ("Is it learning?", LEARNING),
    ("Is it exact?", EXACTNESS),
    ("What does the time go to?", SPEED),
    ("Where are the samples?", FLOW),
    ("Is it healthy?", HEALTH),
)
"""Titles of rows, and their panels: at most 26 in all."""
