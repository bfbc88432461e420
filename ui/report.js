/* The report's own part of the page: the run in numbers, beside its prediction and another run. */
"use strict";

const Report = (() => {
  const cell = (name, text, className = "") => Object.assign(document.createElement(name), { textContent: text, className });

  function row(values, name = "td") {
    const made = document.createElement("tr");
    values.forEach((value, i) => made.append(cell(name, value, i === 0 ? "text" : "")));
    return made;
  }

  function table(head, rows) {
    const made = document.createElement("table");
    const top = document.createElement("thead");
    const body = document.createElement("tbody");
    top.append(row(head, "th"));
    body.append(...rows.map((values) => row(values)));
    made.append(top, body);
    const scroll = document.createElement("div");
    scroll.className = "scroll";
    scroll.append(made);
    return scroll;
  }

  const share = (v) => (v === null || v === undefined ? "–" : `${(100 * v).toFixed(1)}%`);
  const waits = (r) => (r.ranks.length <= 4 ? r.ranks.map((k) => share(k.wait_fraction)).join(" · ") : share(Math.max(...r.ranks.map((k) => k.wait_fraction || 0))));

  function lines(all) {
    const number = Chart.number;
    const rows = [
      ["samples per second (median)", ...all.map((r) => number(r.samples_per_second))],
      ["step (median)", ...all.map((r) => `${number(1000 * r.step_seconds)} ms`)],
      ["waited, by rank", ...all.map(waits)],
      ["best possible, samples per second", ...all.map((r) => number(r.best_samples_per_second))],
      ["achieved of the best possible", ...all.map((r) => share(r.efficiency))],
      ["shares, samples of a step", ...all.map((r) => r.ranks.slice(0, 8).map((k) => number(k.share_samples)).join(" · ") + (r.ranks.length > 8 ? " …" : ""))],
      ["steady steps counted", ...all.map((r) => `${r.steady_steps} of ${r.steps}`)],
      ["last loss", ...all.map((r) => number(r.last_loss))],
    ];
    if (all.some((r) => r.predicted)) {
      rows.push(["predicted before the run, samples per second", ...all.map((r) => (r.predicted ? number(r.predicted.samples_per_second) : "–"))]);
      rows.push(["came of the predicted", ...all.map((r) => (r.predicted ? share(r.samples_per_second / r.predicted.samples_per_second) : "–"))]);
    }
    return rows;
  }

  function show(place, data) {
    const all = [data.report];
    const names = [data.summary.run || "this run"];
    place.hidden = false;
    place.replaceChildren(cell("h2", "Report"));
    if (data.other) {
      all.push(data.other.report);
      names.push(data.other.summary.run || "the other run");
      const speedup = data.comparison && data.comparison.speedup;
      if (speedup) {
        const line = document.createElement("p");
        line.append(cell("span", `${speedup.toFixed(2)}×`, "big"), ` the samples per second of ${names[1]} (policy ${data.other.summary.policy})`);
        place.append(line);
      }
    }
    place.append(table(["", ...names.map((name, i) => `${name} (${(i ? data.other : data).summary.policy})`)], lines(all)));
    const notes = [data.report.warmup_words];
    const difference = data.comparison && data.comparison.parameters;
    if (difference) notes.push(difference.relative_norm === null ? difference.words : `Parameters of the two runs after step ${difference.step}: relative difference ${difference.relative_norm.toExponential(2)} in the norm over all (${difference.words}).`);
    notes.filter(Boolean).forEach((words) => place.append(cell("p", words, "note")));
  }

  return { show };
})();
