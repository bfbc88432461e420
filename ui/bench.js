/* The page of `evenstep bench balance`: aims, plots and all figures. */
"use strict";

(() => {
  const data = EVENSTEP_DATA;
  const parts = ["real", "simulated"].filter((part) => data[part]);
  const NAMES = { ddp: "DDP, equal split", hand: "DDP, split by hand", single: "one device", fixed: "best fixed split" };
  const rowsOf = (part) => ["rows", "courses", "changes", "noise"].flatMap((kind) => data[part][kind] || []).filter((row) => row.utilisation);
  const name = (policy) => NAMES[policy] || policy;
  const percent = (v) => (v === null || v === undefined ? "–" : `${(100 * v).toFixed(0)}%`);
  const cell = (kind, text, className = "") => Object.assign(document.createElement(kind), { textContent: text, className });

  function table(place, head, rows) {
    const made = document.createElement("table");
    const add = (values, kind) => {
      const row = document.createElement("tr");
      values.forEach((value, i) => row.append(cell(kind, value, i < 2 ? "text" : "")));
      made.append(row);
    };
    add(head, "th");
    rows.forEach((values) => add(values, "td"));
    const scroll = cell("div", "", "scroll");
    scroll.append(made);
    place.append(scroll);
  }

  function plot(chart) {
    const figure = document.createElement("figure");
    document.getElementById("charts").append(figure);
    Chart.draw(figure, chart);
  }

  /* One line a policy over the cases, in the order of the table below. */
  function plotCases(part, rows, key, title, unit, most) {
    const cases = [...new Set(rows.map((row) => row.case))];
    const policies = [...new Set(rows.map((row) => row.policy))];
    const value = (of, policy) => {
      const row = rows.find((one) => one.case === of && one.policy === policy);
      const found = row && (key === "worst" ? Math.min(...row.utilisation) : row[key]);
      return found === undefined || found === null ? NaN : found;
    };
    plot({
      title: `${title}, ${part}`, unit, fromZero: true, most, x: cases.map((_, i) => i), xName: "case", names: cases, format: percent,
      series: policies.filter((one) => key === "of_bound" || one !== "single").map((policy, i) => ({
        name: name(policy), colour: Chart.colour(i, policies.length), values: cases.map((one) => value(one, policy)),
      })),
    });
  }

  function plotChange(change) {
    plot({
      title: `A rank slows 4 times, and recovers: ${change.policy}`, unit: "of the best split, by the shares that ran", fromZero: true, most: 1.05,
      x: change.efficiency.map((_, i) => i), xName: "step", format: percent,
      series: [{ name: change.policy, colour: Chart.colour(0, 1), values: change.efficiency }],
      marks: [{ x: change.changes_at[0], text: "4 times slower" }, { x: change.changes_at[1], text: "as before" }],
    });
  }

  document.getElementById("about").textContent = [data.date, data.hardware, data.software, data.quick ? "a short look: no figures to keep" : ""].filter(Boolean).join(" · ");
  table(document.getElementById("aims"), ["what", "", "figure", "aim", ""],
    data.aims.map((aim) => [aim.what, aim.part, aim.figure === null ? "never" : `${Chart.number(aim.figure)}${aim.unit}`, aim.aim, aim.reached ? "reached" : "not reached"]));
  for (const part of parts) {
    plotCases(part, rowsOf(part), "of_bound", "Throughput", "of the best split", 1.2);
    plotCases(part, rowsOf(part), "worst", "Utilisation of the least used device", "of its time", 1.05);
    plotCases(part, rowsOf(part), "imbalance", "Load imbalance", "longest busy time beyond the mean");
    data[part].changes.filter((change) => change.efficiency).forEach(plotChange);
  }
  const all = parts.flatMap((part) => rowsOf(part).map((row) => [part, row]));
  table(document.getElementById("rows"), ["case", "policy", "", "samples/s", "of the best split", "imbalance", "utilisation, by rank"],
    all.map(([part, row]) => [row.case, name(row.policy), part, Chart.number(row.samples_per_second), percent(row.of_bound), row.policy === "single" ? "–" : percent(row.imbalance), row.utilisation.map(percent).join(" ")]));
})();
