/* The page: shows a living run, which it asks once a second, or a finished one, whose data lie in the page. */
"use strict";

const SPANS = ["data", "forward", "backward", "wait", "optimizer", "checkpoint", "evaluation"];
const SPAN_COLOURS = { data: "#b8860b", forward: "#2a78d6", backward: "#6aa9f4", wait: "#c9ccd1", optimizer: "#009e73", checkpoint: "#8a63d2", evaluation: "#cc79a7", communication: "#d55e00" };
const EVERY_MS = 1000;
const byId = (id) => document.getElementById(id);
const percent = (v, digits = 0) => (v === null || !Number.isFinite(v) ? "–" : `${(100 * v).toFixed(digits)}%`);

function duration(seconds) {
  if (seconds === null || !Number.isFinite(seconds)) return "–";
  if (seconds < 1) return `${Chart.number(1000 * seconds)} ms`;
  if (seconds < 100) return `${Chart.number(seconds)} s`;
  if (seconds < 6000) return `${Math.floor(seconds / 60)} min ${String(Math.floor(seconds % 60)).padStart(2, "0")} s`;
  return `${Math.floor(seconds / 3600)} h ${String(Math.floor((seconds / 60) % 60)).padStart(2, "0")} min`;
}

function bytes(value) {
  if (value === null || !Number.isFinite(value)) return "–";
  return value >= 1e9 ? `${(value / 1e9).toFixed(2)} GB` : value >= 1e6 ? `${(value / 1e6).toFixed(0)} MB` : `${(value / 1e3).toFixed(0)} kB`;
}

function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

/* ---- parts ---- */

const TONES = { training: "good", done: "good", interrupted: "warn", failed: "bad", stalled: "bad" };
const VERDICT_TONES = { balanced: "good", stalled: "bad", imbalance: "warn", data: "warn", communication: "warn", checkpoint: "warn" };

function showHead(s) {
  document.title = `${s.run || "run"} · Evenstep`;
  byId("run").textContent = s.run || "run";
  byId("state").textContent = s.state + (s.attempt > 0 ? ` (restart ${s.attempt})` : "");
  byId("state").className = `pill ${TONES[s.state] || "warn"}`;
  const done = s.step === null ? 0 : s.step + 1;
  const parts = [s.total_steps ? `step ${done} of ${s.total_steps}` : `step ${done}`, `epoch ${s.epoch}`, duration(s.elapsed_seconds)];
  if (s.eta_seconds !== null) parts.push(`${duration(s.eta_seconds)} left`);
  if (s.ended && s.exit_code) parts.push(s.exit_code < 0 ? "ended without a word" : `exit code ${s.exit_code}`);
  byId("when").textContent = parts.join(" · ");
  byId("command").textContent = s.command || "";
  const bar = byId("progress");
  bar.hidden = !s.total_steps;
  if (s.total_steps) {
    const share = Math.min(100, (100 * done) / s.total_steps);
    bar.firstElementChild.style.width = `${share}%`;
    bar.setAttribute("aria-valuenow", share.toFixed(0));
  }
  const [limit, advice] = byId("verdict").children;
  if (limit.textContent !== s.verdict.limit) limit.textContent = s.verdict.limit;
  if (advice.textContent !== s.verdict.advice) advice.textContent = s.verdict.advice;
  byId("verdict").className = `verdict ${VERDICT_TONES[s.verdict.kind] || ""}`;
}

/* What went wrong while all ranks lived: what lasts, and what was. */
function showFaults(s) {
  const place = byId("faults");
  const lines = (s.faults || []).filter((f) => f.kind !== "straggler").map((f) => {
    const times = f.count > 1 ? `${f.count} times since step ${f.first_step}; the last at step ${f.step}` : `at step ${f.step}`;
    return element("p", { className: f.lasts ? "" : "advice", textContent: `${f.words} (${times}${f.lasts ? ", and it lasts" : ""})` });
  });
  for (const one of (s.stragglers || []).slice(-8)) lines.push(element("p", { className: one.lasts ? "" : "advice", textContent: one.words }));
  place.hidden = lines.length === 0;
  place.replaceChildren(...lines);
}

function showTiles(s) {
  const tiles = [
    [Chart.number(s.samples_per_second), "samples/s"],
    [percent(s.efficiency === null ? NaN : Math.min(1, s.efficiency)), `of the best possible${s.best_samples_per_second ? ` (${Chart.number(s.best_samples_per_second)})` : ""}`],
    [Chart.number(s.loss), "loss"],
    [duration(s.step_seconds), s.predicted_step_seconds ? `a step (predicted ${duration(s.predicted_step_seconds)})` : "a step"],
    [s.batch === null ? "–" : Chart.number(s.batch), `samples a step, policy ${s.policy || "–"}`],
    [String(s.checkpoints), s.checkpoints === 1 ? "checkpoint" : "checkpoints"],
  ];
  byId("tiles").replaceChildren(...tiles.map(([value, name]) => element("div", { className: "tile" }, element("b", { textContent: value }), element("span", { textContent: name }))));
}

function gpuCell(gpu) {
  if (!gpu) return element("td", { textContent: "–" });
  const known = [[percent(gpu.utilization), gpu.utilization], [`${Chart.number(gpu.clock_mhz)} MHz`, gpu.clock_mhz], [`${Chart.number(gpu.temperature_celsius)} °C`, gpu.temperature_celsius],
    [`${Chart.number(gpu.power_watts)} W`, gpu.power_watts], [bytes(gpu.memory_bytes), gpu.memory_bytes]].filter(([, value]) => value !== null).map(([words]) => words);
  const errors = gpu.corrected_errors === null ? "" : `memory errors: ${gpu.corrected_errors} corrected, ${gpu.uncorrected_errors ?? "?"} not`;
  return element("td", { textContent: known.join(" · ") + (gpu.slowed ? " · held down" : ""), title: errors });
}

function showRanks(s) {
  const gpus = s.ranks.some((r) => r.gpu);
  const head = ["rank", "device", "share", "samples/s while busy", "wait", "busy", "CPU", "memory", ...(gpus ? ["GPU"] : []), "communication", "stopped by quota", ""];
  const rows = s.ranks.map((r) => {
    const mine = Chart.colour(r.rank, s.ranks.length);
    const meter = element("span", { className: "meter" }, element("i"));
    meter.firstChild.style.cssText = `width:${s.batch ? (100 * r.share_samples) / s.batch : 0}%;background:${mine}`;
    const share = element("td", {}, meter, r.share_samples === null ? "–" : `${Chart.number(r.share_samples)} of ${Chart.number(s.batch)}`);
    const limit = r.quota !== null ? ` (limited to ${percent(r.quota)})` : "";
    const cells = [
      element("td", { textContent: r.rank }),
      element("td", { className: "text", textContent: `${r.device}${r.model ? ` · ${r.model}` : ""}${limit}` }),
      share,
      element("td", { textContent: Chart.number(r.samples_per_busy_second) }),
      element("td", { textContent: percent(r.wait_fraction) }),
      element("td", { textContent: duration(r.busy_seconds) }),
      element("td", { textContent: r.cpu_cores === null ? "–" : `${Chart.number(r.cpu_cores)} of ${Chart.number(r.cores)}` }),
      element("td", { textContent: bytes(r.rss_bytes) }),
      ...(gpus ? [gpuCell(r.gpu)] : []),
      element("td", { textContent: r.collective_bytes_per_second > 0 ? `${bytes(r.collective_bytes_per_second)}/s` : "–", title: r.bus_bandwidth_bytes_per_second > 0 ? `bus bandwidth while it moves: ${bytes(r.bus_bandwidth_bytes_per_second)}/s` : "" }),
      element("td", { textContent: percent(r.throttled_fraction) }),
      element("td", { className: "text", textContent: endedWell(r.cause) ? (r.alive || s.ended ? "" : "not running") : r.cause }),
    ];
    return element("tr", { className: r.alive || s.ended ? "" : "dead" }, ...cells);
  });
  const titles = element("tr", {}, ...head.map((name) => element("th", { textContent: name, scope: "col", className: name === "device" ? "text" : "" })));
  byId("ranks").replaceChildren(element("thead", {}, titles), element("tbody", {}, ...rows));
}

function showSpans(spans) {
  const place = byId("spans");
  const total = (r) => SPANS.reduce((sum, name) => sum + (r.seconds_per_step[name] || 0), 0);
  const most = Math.max(0, ...spans.ranks.map(total), ...spans.ranks.map((r) => r.seconds_per_step.communication || 0));
  if (!(most > 0)) {
    place.className = "empty";
    place.textContent = "no spans yet";
    return;
  }
  const used = [...SPANS, "communication"].filter((name) => spans.ranks.some((r) => r.seconds_per_step[name] > 0));
  const track = (r, names, beside) => {
    const made = element("div", { className: beside ? "track beside" : "track" });
    for (const name of names) {
      const seconds = r.seconds_per_step[name];
      if (!(seconds > 0)) continue;
      const part = element("div", { title: `${name}: ${duration(seconds)}` });
      part.style.cssText = `width:${(100 * seconds) / most}%;background:${SPAN_COLOURS[name]}`;
      made.append(part);
    }
    made.setAttribute("role", "img");
    made.setAttribute("aria-label", names.map((name) => `${name} ${duration(r.seconds_per_step[name])}`).join(", "));
    return made;
  };
  const rows = spans.ranks.flatMap((r) => {
    const cells = [element("span", { textContent: `rank ${r.rank}` }), track(r, SPANS, false), element("span", { className: "number", textContent: duration(total(r)) })];
    if (r.seconds_per_step.communication > 0) cells.push(element("span"), track(r, ["communication"], true), element("span", { className: "number quiet", textContent: duration(r.seconds_per_step.communication) }));
    return cells;
  });
  const legend = element("div", { className: "legend" }, ...used.map((name) => {
    const dot = element("i");
    dot.style.background = SPAN_COLOURS[name];
    return element("span", {}, dot, name);
  }));
  place.className = "";
  place.replaceChildren(element("div", { className: "bars" }, ...rows), legend);
}

/* the agent's words for a rank that did nothing wrong */
const endedWell = (words) => !words || words.includes("ended well") || words.includes("stopped");

/* monitor/faults.h; with value 0 one is over */
const FAULTS = new Set(["hang", "nonfinite", "parameters", "loss_spike", "gpu", "link", "straggler"]);

const EVENT_WORDS = {
  shares: (e) => `shares ${e.words}`, checkpoint: (e) => `checkpoint ${e.words} is whole`, epoch: (e) => `epoch ${e.value} begins`,
  resume: (e) => `resumed at step ${e.value}`, message: (e) => e.words, scalar: (e) => `${e.words} = ${e.value === null ? "not a number" : e.value}`, attempt: (e) => e.words,
  rank_started: (e) => `rank ${e.rank} runs on ${e.words} (process ${e.value})`, rank_ended: (e) => e.words || `rank ${e.rank} ended`,
  compression: (e) => e.words, batch: (e) => `global ${e.words}`, memory: (e) => e.words, left_out: (e) => e.words, generation: (e) => e.words, checkpoints_wait: (e) => e.words, skipped: (e) => `rank ${e.rank}: ${e.words}`, stall: (e) => `STALL: ${e.words}`,
  balancing: (e) => (e.value ? `balancing was measured slower than ${e.value === 2 ? "the profile's split" : "equal shares"} (${e.words}): went back` : `balanced shares are faster again (${e.words})`),
  joining: (e) => `rank ${e.rank} ${e.words || "waits for the others"}`, joined: (e) => `rank ${e.rank}: ${e.words || "all ranks have come"}`,
  opening: (e) => `rank ${e.rank} ${e.words || "waits in init_process_group"}`, opened: (e) => `rank ${e.rank} ${e.words || "has left init_process_group"}`,
  lost_records: (e) => e.words, total_steps: (e) => `${e.value} steps to make`,
};

function showEvents(events) {
  const rows = events.slice(-200).reverse().map((e) => {
    const words = (EVENT_WORDS[e.event] || ((x) => x.words))(e);
    return element("li", {}, element("span", { className: "quiet", textContent: duration(Math.max(0, e.seconds)) }), element("span", { className: "quiet", textContent: `step ${e.step}` }),
      element("span", { textContent: words, className: e.event === "attempt" || (e.event === "rank_ended" && !endedWell(e.words)) || (FAULTS.has(e.event) && e.value !== 0) ? "bad" : "" }));
  });
  byId("events").replaceChildren(...(rows.length ? rows : [element("li", { className: "empty", textContent: "nothing yet" })]));
}

/* `other`: the points of a run to compare with, or null */
function showCharts(points, s, events, other) {
  const x = points.map((p) => p[0]);
  const ranks = s.ranks.map((r) => r.rank);
  const marks = events.filter((e) => e.event === "attempt").map((e) => ({ x: e.step, text: e.words }));
  const at = (i) => points.map((p) => p[i] ?? NaN);
  const theirs = (i) => {
    const known = new Map(other.points.map((p) => [p[0], p[i] ?? NaN]));
    return x.map((step) => known.get(step) ?? NaN);
  };
  const rank = (i, r) => points.map((p) => p[i][r] ?? NaN);
  const name = (r) => `rank ${r}${s.ranks[r].device ? ` (${s.ranks[r].device})` : ""}`;
  const common = { x, xName: "step", marks };
  const pair = (i) => {
    const mine = { name: s.run || "this run", colour: Chart.colour(0, 2), values: at(i) };
    return other ? [mine, { name: other.name, colour: Chart.colour(1, 2), values: theirs(i), dashed: true }] : [mine];
  };
  Chart.draw(byId("throughput"), { ...common, title: "Throughput", unit: "samples/s", series: pair(3), fromZero: true });
  Chart.draw(byId("loss"), { ...common, title: "Loss", unit: "mean over the global batch", series: pair(4) });
  const many = ranks.length > 8;
  Chart.draw(byId("share"), { ...common, title: "Share of each rank", unit: "samples a step", stacked: true, series: ranks.map((r) => ({ name: name(r), colour: Chart.colour(r, ranks.length), values: rank(6, r) })) });
  Chart.draw(byId("wait"), { ...common, title: "Wait of each rank", unit: "part of the step in which it stood still", fromZero: true, most: 1, least: 0.1, format: (v) => percent(v),
    series: ranks.map((r) => ({ name: name(r), colour: Chart.colour(r, ranks.length), values: rank(7, r), thin: many })) });
}

/* ---- a finished run: everything is here ---- */

function showStored(data) {
  showHead(data.summary);
  showFaults(data.summary);
  showTiles(data.summary);
  showRanks(data.summary);
  showSpans(data.spans);
  showEvents(data.events.events);
  const other = data.other ? { name: data.other.summary.run || "the other run", points: data.other.steps.points } : null;
  showCharts(data.steps.points, data.summary, data.events.events, other);
  if (data.report) Report.show(byId("report"), data);
  byId("foot").textContent = `report of ${new Date(1000 * data.summary.started_unix_seconds).toLocaleString()}`;
}

/* ---- a living run: ask, show, ask again ---- */

const live = { points: [], generation: -1, stride: -1, events: [], lastEvent: 0, failures: 0, ended: false };

async function ask(path) {
  const answer = await fetch(path, { credentials: "same-origin", signal: AbortSignal.timeout ? AbortSignal.timeout(5000) : undefined });
  if (answer.status === 401) throw new Error("token");
  if (!answer.ok) throw new Error(`HTTP ${answer.status}`);
  return answer.json();
}

async function askSteps() {
  const since = live.points.length ? live.points[live.points.length - 1][0] : -1;
  const steps = await ask(`/api/v1/steps?since=${since}`);
  if (steps.generation !== live.generation || steps.stride !== live.stride) {
    const all = since < 0 ? steps : await ask("/api/v1/steps");
    live.points = all.points;
    live.generation = all.generation;
    live.stride = all.stride;
    return;
  }
  if (live.points.length) live.points.pop(); /* the last one comes again: it may have grown */
  live.points.push(...steps.points);
}

async function askEvents(s) {
  if (s.events < live.lastEvent) live.events = [], (live.lastEvent = 0);
  if (s.events === live.lastEvent) return;
  const answer = await ask(`/api/v1/events?since=${live.lastEvent}`);
  live.events.push(...answer.events);
  live.events.splice(0, Math.max(0, live.events.length - 400));
  live.lastEvent = answer.last;
}

async function turn() {
  try {
    const s = await ask("/api/v1/summary");
    const [spans] = await Promise.all([ask("/api/v1/spans"), askSteps(), askEvents(s)]);
    live.failures = 0;
    live.seen = s;
    showHead(s);
    showFaults(s);
    showTiles(s);
    showRanks(s);
    showSpans(spans);
    showEvents(live.events);
    showCharts(live.points, s, live.events, null);
    byId("foot").textContent = `updated ${new Date().toLocaleTimeString()}`;
  } catch (error) {
    live.failures++;
    if (error.message === "token") {
      byId("state").textContent = "not allowed";
      byId("verdict").children[0].textContent = "The token is missing or wrong: open the address that evenstep run printed.";
      return;
    }
    if (live.failures >= 3) {
      byId("state").textContent = "no answer";
      byId("state").className = "pill warn";
      byId("foot").textContent = live.seen
        ? "the run's server is gone: the run ended, or the connection did. Its report.html lies in the run's folder. Asking again…"
        : "no answer yet. Asking again…";
    }
  }
  setTimeout(turn, Math.min(10000, EVERY_MS * (1 + live.failures)));
}

if (EVENSTEP_DATA) {
  showStored(EVENSTEP_DATA);
} else {
  if (location.search.includes("token=")) history.replaceState(null, "", location.pathname); /* the cookie has it now */
  turn();
}
