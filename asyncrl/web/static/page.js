// The page of a run: shows snapshots as they come, fetches sections that have changed, gives orders.
"use strict";

const UNKNOWN = "–";
const SILENT_MS = 15000; // without a snapshot for so long, the connection counts as lost
const LOST_MS = 120000; // without the run for so long, the token is forgotten
const HOVER_MS = 20000; // a section that is pointed at is not replaced for so long
const byId = (id) => document.getElementById(id);

// ------------------------------------------------------------------ numbers, as in monitoring/terminal/formatting.py

const known = (value) => typeof value === "number" && !Number.isNaN(value);
const number = (value, digits = 2) => (known(value) ? value.toFixed(digits) : UNKNOWN);
const percent = (value, digits = 0) => (known(value) ? `${(100 * value).toFixed(digits)}%` : UNKNOWN);

function count(value) {
  if (!known(value)) return UNKNOWN;
  for (const [size, suffix] of [[1e12, "T"], [1e9, "G"], [1e6, "M"]]) {
    if (Math.abs(value) >= size) return `${Number((value / size).toPrecision(3))}${suffix}`;
  }
  return Math.round(value).toLocaleString("en-US");
}

const brief = (seconds) => (seconds < 1 ? `${number(1000 * seconds, 1)} ms` : duration(seconds));

function duration(seconds) {
  if (!known(seconds)) return UNKNOWN;
  if (seconds < 9.95) return `${Math.max(0, seconds).toFixed(1)} s`;
  const whole = Math.round(seconds);
  const two = (value) => String(value).padStart(2, "0");
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${two(whole % 60)} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${two(Math.floor((whole % 3600) / 60))} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

// ------------------------------------------------------------------ the token

// It stands behind `#` in the link, which browsers send to no server, and leaves the address bar.
function takeToken() {
  const found = /^#token=(.+)$/.exec(location.hash);
  if (!found) return;
  sessionStorage.setItem("token", decodeURIComponent(found[1]));
  history.replaceState(null, "", location.pathname);
}

const token = () => sessionStorage.getItem("token");
const headers = () => (token() ? { Authorization: `Bearer ${token()}` } : {});

// Whether reading needs the token, as it does on an address other than loopback. The first answer
// decides it for as long as the page is open: who takes the port after the run's end cannot ask for it.
let locked;

async function read(path, options = {}) {
  const answer = await fetch(path, { ...options, headers: locked ? headers() : {} });
  if (locked !== undefined) return answer;
  if (answer.status === 401 && token()) {
    locked = true;
    return read(path, options);
  }
  if (answer.ok) locked = false;
  return answer;
}

// ------------------------------------------------------------------ what is shown

const text = (id, value) => { if (byId(id).textContent !== value) byId(id).textContent = value; };

function tile(key, value) {
  for (const element of document.querySelectorAll(`[data-key="${key}"]`)) {
    if (element.textContent !== value) element.textContent = value;
  }
}

function show(snapshot) {
  const status = snapshot.status;
  byId("error").hidden = !snapshot.error;
  text("error", snapshot.error ?? "");
  document.body.classList.toggle("stale", !status);
  showControls(snapshot.takes_orders);
  text("watchers", snapshot.watchers === 1 ? "1 page watches" : `${snapshot.watchers} pages watch`);
  text("updated", new Date(snapshot.time * 1000).toLocaleTimeString());
  if (status) showStatus(status);
  refresh(snapshot.sections);
}

function showStatus(status) {
  text("run", status.run);
  document.title = `${status.step}/${status.steps} · ${status.run} · asyncrl`;
  text("phase", status.phase);
  const left = known(status.eta_seconds) ? `, ${duration(status.eta_seconds)} left` : "";
  text("extent", `, ${status.step} of ${status.steps} steps, ${status.engine} engine${left}`);
  const progress = byId("progress");
  progress.setAttribute("aria-valuemax", status.steps);
  progress.setAttribute("aria-valuenow", status.step);
  progress.firstElementChild.style.width = `${(100 * status.step) / status.steps}%`;
  text("waiting", status.waiting_for ? `waiting: ${status.waiting_for}` : "");
  showTiles(status);
  showEnvironments(status);
  showProcesses(status.processes);
}

function showTiles(status) {
  tile("reward_mean", number(status.reward_mean, 3));
  const after = known(status.accuracy_after);
  const during = !after && known(status.accuracy) && status.accuracy_step > 0;
  const before = `${percent(status.accuracy_before, 1)} before`;
  tile("accuracy", percent(after ? status.accuracy_after : during ? status.accuracy : status.accuracy_before, 1));
  let when = after ? `after training; ${before}` : during ? `of step ${status.accuracy_step}; ${before}` : "before training";
  if (known(status.best_step) && during) when += `; best ${percent(status.best_accuracy, 1)} at step ${status.best_step}`;
  if (known(status.held_out_reward)) when += `; mean reward ${number(status.held_out_reward, 3)}`;
  if (status.evaluation_incomplete) when += `; ${status.evaluation_incomplete}`;
  if (status.evaluating) when += `; evaluating ${status.evaluating}`;
  tile("accuracy_when", when);
  tile("tokens_per_second", count(status.tokens_per_second));
  tile("staleness_mean", number(status.staleness_mean));
  const onPolicy = { true: "exactly on-policy", false: "not exactly on-policy" }[status.exactly_on_policy];
  const most = known(status.staleness_max) ? `${status.staleness_max} at most` : "steps";
  tile("on_policy", onPolicy ? `${most}, ${onPolicy} so far` : most);
  for (const key of ["generator_idle", "trainer_idle", "drafted_share", "draft_acceptance"]) {
    tile(key, percent(status[key]));
  }
  for (const key of ["groups_trained", "groups_in_flight", "groups_failed", "samples_running",
    "samples_held", "samples_queued"]) {
    tile(key, count(status[key]));
  }
}

function showEnvironments(status) {
  const parts = [];
  if (known(status.environment_turns)) {
    parts.push(`environments: ${count(status.environment_turns)} turns answered, ${brief(status.environment_seconds)} each`);
    if (status.samples_in_environments) parts.push(`${count(status.samples_in_environments)} samples wait for an answer`);
    if (known(status.started_over)) parts.push(`${count(status.started_over)} samples started over`);
  }
  const failed = Object.entries(status.reward_failures ?? {}).map(([name, reasons]) => `${name}: ${
    Object.entries(reasons).map(([reason, times]) => `${count(times)} ${reason.replaceAll("_", " ")}`).join(", ")}`);
  if (failed.length) parts.push(`rewards that failed and counted as 0: ${failed.join("; ")}`);
  text("environments", parts.join(" · "));
}

function showProcesses(processes) {
  const names = Object.keys(processes ?? {});
  byId("processes").hidden = names.length === 0;
  const rows = names.map((name) => {
    const about = processes[name];
    const version = about.policy_version >= 0 ? String(about.policy_version) : UNKNOWN;
    const row = document.createElement("tr");
    for (const value of [name, about.state, version, about.metrics_port ?? UNKNOWN]) {
      row.append(Object.assign(document.createElement("td"), { textContent: value }));
    }
    row.dataset.process = name;
    row.children[1].className = `state-${about.state}`;
    return row;
  });
  byId("rows").replaceChildren(...rows);
  const field = byId("generators");
  if (!field.value && document.activeElement !== field) {
    const present = names.filter((name) => name.startsWith("generator") && !["lost", "left", "leaving"].includes(processes[name].state));
    if (present.length) field.placeholder = String(present.length);
  }
}

// ------------------------------------------------------------------ sections of the report

const shown = {}; // section -> version that is on the page
const skippedSince = {}; // section -> when its replacement was put off, because it is pointed at
let refreshing = false;

async function refresh(versions) {
  if (refreshing) return;
  refreshing = true;
  try {
    for (const [name, version] of Object.entries(versions)) {
      if (shown[name] === version || isBusy(name)) continue;
      const answer = await read(`/api/report/${name}`);
      if (!answer.ok) continue;
      replace(name, await answer.text());
      shown[name] = version;
    }
  } catch { /* the stream notices a lost connection */ } finally { refreshing = false; }
}

function isBusy(name) {
  const place = document.querySelector(`[data-section="${name}"]`);
  const busy = shown[name] && (place.matches(":hover") || place.contains(document.activeElement));
  skippedSince[name] = busy ? skippedSince[name] ?? Date.now() : undefined;
  return busy && Date.now() - skippedSince[name] < HOVER_MS;
}

// The server has escaped all text of the run (monitoring/report/markup.py), and the page's content
// security policy runs no script but this one.
function replace(name, html) {
  const place = document.querySelector(`[data-section="${name}"]`);
  const open = [...place.querySelectorAll("details")].map((one) => one.open);
  const scrolled = [...place.querySelectorAll(".wide")].map((one) => one.scrollLeft);
  const isNew = !shown[name];
  place.innerHTML = html;
  place.querySelectorAll("details").forEach((one, index) => { one.open = open[index] ?? false; });
  place.querySelectorAll(".wide").forEach((one, index) => {
    const newest = one.firstElementChild.tagName === "svg" ? one.scrollWidth : 0; // on a phone
    one.scrollLeft = isNew ? newest : scrolled[index] ?? 0;
  });
}

// ------------------------------------------------------------------ orders

const QUESTIONS = {
  stop: ["Stop the run?", "It finishes the current step, writes a checkpoint and ends.", "Stop the run"],
  drain: ["Drain the run?", "It starts nothing more, trains what is started and ends.", "Drain the run"],
  scale: ["Change the number of generators?", "", "Scale"],
};

function showControls(takesOrders) {
  byId("controls").hidden = !takesOrders || !token();
  byId("locked").hidden = !takesOrders || Boolean(token());
  if (!byId("why-locked").textContent) {
    text("why-locked", "You can watch. Orders need the token: `asyncrl web` prints a link that has it.");
  }
}

function ask(title, consequence, action) {
  text("question", title);
  text("consequence", consequence);
  text("yes", action);
  const dialog = byId("confirm");
  dialog.showModal();
  return new Promise((decide) => {
    const done = (answer) => { dialog.close(); decide(answer); };
    byId("yes").onclick = () => done(true);
    byId("no").onclick = () => done(false);
    dialog.oncancel = () => decide(false);
    byId("no").focus();
  });
}

function said(kind, message) {
  byId("answer").dataset.kind = kind;
  byId("answer").textContent = message;
}

function argumentsOf(order) {
  if (order === "scale") {
    const generators = byId("generators").valueAsNumber;
    if (!Number.isInteger(generators) || generators < 1) throw new Error("give a number of generators, at least 1");
    return { generators };
  }
  if (order === "set") {
    const key = byId("key").value.trim();
    if (!key) throw new Error("give the key of a setting");
    return { key, value: byId("value").value.trim() };
  }
  return {};
}

async function give(order, button) {
  let body;
  try { body = argumentsOf(order); } catch (error) { said("bad", `${order}: ${error.message}`); return; }
  if (order in QUESTIONS) {
    const [title, consequence, action] = QUESTIONS[order];
    const what = order === "scale" ? `The run will have ${body.generators} generator${body.generators === 1 ? "" : "s"}.` : consequence;
    if (!(await ask(title, what, action))) { said("", `${order}: cancelled`); return; }
  }
  button.disabled = true;
  said("", `${order}: sent`);
  try {
    const answer = await fetch(`/api/orders/${order}`, {
      method: "POST",
      headers: { ...headers(), "Content-Type": "application/json" },
      body: JSON.stringify(body),
    });
    const found = await answer.json();
    if (answer.status === 401) forgetToken();
    if (answer.ok) said("good", `${order}: ${found.accepted}`);
    else said("bad", `${order} was refused: ${reasonOf(found)}`);
  } catch {
    said("bad", `${order}: the page lost its connection, so it is not known whether the order arrived`);
  } finally { button.disabled = false; }
}

const reasonOf = (found) => (typeof found.detail === "string" ? found.detail
  : (found.detail ?? []).map((one) => `${(one.loc ?? []).slice(1).join(".")}: ${one.msg}`).join("; "));

function forgetToken(why = "The token is not that of this run (a run that is started again has a new one)") {
  sessionStorage.removeItem("token");
  text("why-locked", `${why}: \`asyncrl web\` prints a link with the right one.`);
}

// ------------------------------------------------------------------ the stream of snapshots

const wait = (ms) => new Promise((done) => setTimeout(done, ms));

function linked(state, words) {
  byId("link").dataset.state = state;
  text("link", words);
}

// `EventSource` cannot send a token, so the stream is read by hand.
async function stream() {
  const given_up = new AbortController();
  let silent = setTimeout(() => given_up.abort(), SILENT_MS);
  try {
    const answer = await read("/api/events", { signal: given_up.signal });
    if (answer.status === 401) {
      forgetToken();
      showControls(true);
      throw new Error("a token is needed");
    }
    if (!answer.ok) throw new Error(reasonOf(await answer.json()));
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let waiting = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) throw new Error("the connection was closed");
      clearTimeout(silent);
      silent = setTimeout(() => given_up.abort(), SILENT_MS);
      const events = (waiting + value).split("\n\n");
      waiting = events.pop();
      for (const event of events) if (take(event)) return;
    }
  } finally { clearTimeout(silent); given_up.abort(); }
}

let heard = Date.now(); // when the run was heard of last

// Whether this was the last event.
function take(event) {
  heard = Date.now();
  const kind = /^event: (.*)$/m.exec(event)?.[1];
  if (kind === "end") return true;
  const snapshot = JSON.parse(/^data: (.*)$/m.exec(event)[1]);
  if (snapshot.takes_orders) linked("live", "live"); else linked("ended", "the run has ended");
  show(snapshot);
  return false;
}

async function follow() {
  for (let pause = 1000; ; pause = Math.min(10000, pause * 1.6)) {
    const began = Date.now();
    try {
      await stream();
      linked("ended", "the run has ended; `asyncrl web` shows it again");
      forgetToken("The run has ended");
      showControls(false);
    } catch (error) { linked("lost", `not connected: ${error.message}; trying again`); }
    if (Date.now() - began > 30000) pause = 1000;
    // Another program may have the port by now.
    if (token() && Date.now() - heard > LOST_MS) { forgetToken("The run was not heard of for a while"); showControls(true); }
    await wait(pause);
  }
}

takeToken();
window.addEventListener("hashchange", () => { takeToken(); });
for (const button of document.querySelectorAll("button[data-order]")) {
  button.addEventListener("click", () => give(button.dataset.order, button));
}
for (const form of document.querySelectorAll("form[data-order]")) {
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    give(form.dataset.order, form.querySelector("button"));
  });
}
byId("unlock").addEventListener("submit", (event) => {
  event.preventDefault();
  const given = byId("token").value.trim();
  byId("token").value = "";
  if (given) { heard = Date.now(); sessionStorage.setItem("token", given); showControls(true); }
});
follow();
