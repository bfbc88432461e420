/* Charts: lines and stacked areas in SVG, with a crosshair. */
"use strict";

const Chart = (() => {
  const EDGE = { left: 46, right: 8, top: 8, bottom: 22 };
  const HEIGHT = 210;
  const NAMESPACE = "http://www.w3.org/2000/svg";

  /* Okabe and Ito's colours, told apart by colour-blind readers too; more ranks go round the colour wheel. */
  const PALETTE = ["#2a78d6", "#d55e00", "#009e73", "#b8860b", "#cc79a7", "#56b4e9", "#8a63d2", "#7f7f7f"];
  const colour = (i, count) =>
    count <= PALETTE.length ? PALETTE[i] : `hsl(${Math.round((i * 360) / count)} 60% ${i % 2 ? 62 : 46}%)`;

  function number(value) {
    if (value === null || !Number.isFinite(value)) return "–";
    const size = Math.abs(value);
    if (size >= 1e9) return (value / 1e9).toPrecision(3) + " G";
    if (size >= 1e6) return (value / 1e6).toPrecision(3) + " M";
    if (size >= 1e4) return (value / 1e3).toPrecision(3) + " k";
    if (size >= 100) return value.toFixed(0);
    if (size === 0) return "0";
    return size >= 0.001 ? String(Number(value.toPrecision(3))) : value.toExponential(1);
  }

  /* The label of a tick: as many digits as tell it from its neighbours. */
  function label(value, step) {
    if (Math.abs(value) >= 1e4 || !(step > 0)) return number(value);
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    return digits > 6 ? value.toExponential(2) : value.toFixed(digits);
  }

  /* Round numbers that cover low … high, about `count` of them. */
  function ticks(low, high, count) {
    const span = high - low || Math.abs(high) || 1;
    const rough = span / count;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].find((m) => m * power >= rough) * power;
    const all = [];
    for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + step * 1e-6; v += step) all.push(Math.abs(v) < step * 1e-6 ? 0 : v);
    return all;
  }

  function quantile(sorted, q) {
    return sorted[Math.min(sorted.length - 1, Math.floor(q * sorted.length))];
  }

  /* At most `limit` points: neighbours are averaged, so that no series loses its level. */
  function reduce(x, series, limit) {
    if (x.length <= limit) return { x, series };
    const together = Math.ceil(x.length / limit);
    const shortX = [];
    const short = series.map(() => []);
    for (let at = 0; at < x.length; at += together) {
      const end = Math.min(x.length, at + together);
      shortX.push(x[end - 1]);
      series.forEach((one, s) => {
        let sum = 0;
        let count = 0;
        for (let i = at; i < end; i++) {
          if (Number.isFinite(one.values[i])) {
            sum += one.values[i];
            count++;
          }
        }
        short[s].push(count ? sum / count : NaN);
      });
    }
    return { x: shortX, series: series.map((one, s) => ({ ...one, values: short[s] })) };
  }

  function make(name, attributes, parent) {
    const element = document.createElementNS(NAMESPACE, name);
    for (const key in attributes) element.setAttribute(key, attributes[key]);
    if (parent) parent.appendChild(element);
    return element;
  }

  /* The range of y: from zero where asked, without the outliers of the first steps. */
  function range(series, options) {
    if (options.stacked) return [0, options.most || Math.max(1e-9, ...series[0].values.map((_, i) => series.reduce((sum, one) => sum + (one.values[i] || 0), 0)))];
    const values = series.flatMap((one) => one.values.filter(Number.isFinite)).sort((a, b) => a - b);
    if (!values.length) return [0, 1];
    let low = options.fromZero ? 0 : values[0];
    let high = values.length > 20 ? Math.max(quantile(values, 0.98) * (options.fromZero ? 1.12 : 1), quantile(values, 0.5)) : values[values.length - 1] * (options.fromZero ? 1.08 : 1);
    if (options.most) high = Math.min(options.most, Math.max(high, options.least || 0));
    if (!(high > low)) high = low + (Math.abs(low) || 1) * 0.1;
    if (!options.fromZero) {
      const room = (high - low) * 0.06;
      low -= room;
      high += room;
    }
    return [low, high];
  }

  function lines(group, x, one, px, py) {
    let path = "";
    let open = false;
    x.forEach((at, i) => {
      const value = one.values[i];
      if (!Number.isFinite(value)) {
        open = false;
        return;
      }
      path += `${open ? "L" : "M"}${px(at).toFixed(1)} ${py(value).toFixed(1)}`;
      open = true;
    });
    const style = { d: path, fill: "none", stroke: one.colour, "stroke-width": one.thin ? 1.2 : 1.8, "stroke-linejoin": "round", "stroke-linecap": "round" };
    if (one.dashed) style["stroke-dasharray"] = "5 4";
    make("path", style, group);
  }

  function areas(group, x, series, px, py) {
    const base = x.map(() => 0);
    for (const one of series) {
      const under = base.slice();
      x.forEach((_, i) => (base[i] += one.values[i] || 0));
      let path = x.map((at, i) => `${i ? "L" : "M"}${px(at).toFixed(1)} ${py(base[i]).toFixed(1)}`).join("");
      for (let i = x.length - 1; i >= 0; i--) path += `L${px(x[i]).toFixed(1)} ${py(under[i]).toFixed(1)}`;
      make("path", { d: path + "Z", fill: one.colour, "fill-opacity": 0.8, stroke: "var(--card)", "stroke-width": 0.7 }, group);
    }
  }

  /* Draws into `figure`. data: {title, unit, x, xName, series: [{name, colour, values, dashed}], stacked, fromZero, most, least,
   * format, marks: [{x, text}], names (of x = 0, 1, … where these are no numbers)}. Called again with new data it replaces the drawing. */
  function draw(figure, data) {
    figure.chartData = data;
    if (!figure.chartReady) {
      figure.chartReady = true;
      figure.innerHTML = '<figcaption><span></span><span class="unit"></span></figcaption><div class="plot"></div><div class="legend"></div><div class="tip" hidden></div>';
      new ResizeObserver(() => redraw(figure)).observe(figure);
    }
    redraw(figure);
  }

  function redraw(figure) {
    const data = figure.chartData;
    const plot = figure.querySelector(".plot");
    const width = Math.max(220, plot.clientWidth || 560);
    const format = data.format || number;
    figure.querySelector("figcaption span").textContent = data.title;
    figure.querySelector(".unit").textContent = data.unit;
    plot.textContent = "";
    legend(figure, data);
    const svg = make("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, height: HEIGHT, role: "img", "aria-label": words(data, format) }, plot);
    if (!data.x.length || !data.series.some((one) => one.values.some(Number.isFinite))) {
      make("text", { x: width / 2, y: HEIGHT / 2, "text-anchor": "middle" }, svg).textContent = "nothing measured yet";
      return;
    }
    const { x, series } = reduce(data.x, data.series, Math.max(60, Math.floor(width / 1.5)));
    const [low, high] = range(series, data);
    const first = x[0];
    const last = x[x.length - 1] > first ? x[x.length - 1] : first + 1;
    const levels = ticks(low, high, 5);
    const step = levels.length > 1 ? levels[1] - levels[0] : 0;
    const names = levels.map((v) => (data.format ? data.format(v) : label(v, step)));
    const MARGIN = { ...EDGE, left: Math.max(EDGE.left, 12 + 7 * Math.max(0, ...names.map((name) => name.length))) };
    const px = (v) => MARGIN.left + ((v - first) / (last - first)) * (width - MARGIN.left - MARGIN.right);
    const py = (v) => HEIGHT - MARGIN.bottom - ((Math.min(v, high) - low) / (high - low)) * (HEIGHT - MARGIN.top - MARGIN.bottom);
    levels.forEach((value, i) => {
      make("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: py(value), y2: py(value) }, svg);
      make("text", { x: MARGIN.left - 6, y: py(value) + 4, "text-anchor": "end" }, svg).textContent = names[i];
    });
    for (const value of ticks(first, last, Math.max(2, Math.floor(width / 110))).filter(Number.isInteger)) {
      make("text", { x: px(value), y: HEIGHT - 5, "text-anchor": px(value) > width - 30 ? "end" : "middle" }, svg).textContent = data.names && data.names[value].length < 8 ? data.names[value] : number(value);
    }
    make("line", { class: "axis", x1: MARGIN.left, x2: width - MARGIN.right, y1: HEIGHT - MARGIN.bottom, y2: HEIGHT - MARGIN.bottom }, svg);
    const group = make("g", {}, svg);
    if (data.stacked) areas(group, x, series, px, py);
    else series.forEach((one) => lines(group, x, one, px, py));
    for (const mark of data.marks || []) {
      if (mark.x < first || mark.x > last) continue;
      const line = make("line", { class: "mark", x1: px(mark.x), x2: px(mark.x), y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom }, svg);
      make("title", {}, line).textContent = mark.text;
    }
    crosshair(figure, svg, { x, series, px, width, left: MARGIN.left, first, last, format, data });
  }

  function legend(figure, data) {
    const place = figure.querySelector(".legend");
    place.textContent = "";
    if (data.series.length < 2) return;
    for (const one of data.series) {
      const item = document.createElement("span");
      const dot = document.createElement("i");
      dot.style.background = one.colour;
      item.append(dot, one.name);
      place.append(item);
    }
  }

  /* What a screen reader says in place of the drawing. */
  function words(data, format) {
    const now = data.series.slice(0, 8).map((one) => {
      const value = one.values.findLast ? one.values.findLast(Number.isFinite) : one.values.filter(Number.isFinite).pop();
      return `${one.name} ${format(value ?? NaN)}`;
    });
    return `${data.title}, last: ${now.join(", ")}`;
  }

  function crosshair(figure, svg, { x, series, px, width, left, first, last, format, data }) {
    const tip = figure.querySelector(".tip");
    const cross = make("line", { class: "cross", y1: EDGE.top, y2: HEIGHT - EDGE.bottom, visibility: "hidden" }, svg);
    svg.onpointerleave = () => {
      tip.hidden = true;
      cross.setAttribute("visibility", "hidden");
    };
    svg.onpointermove = (event) => {
      const box = svg.getBoundingClientRect();
      const at = first + (((event.clientX - box.left) / box.width) * width - left) / (width - left - EDGE.right) * (last - first);
      let index = 0;
      while (index + 1 < x.length && Math.abs(x[index + 1] - at) <= Math.abs(x[index] - at)) index++;
      cross.setAttribute("x1", px(x[index]));
      cross.setAttribute("x2", px(x[index]));
      cross.setAttribute("visibility", "visible");
      tip.textContent = data.names ? data.names[x[index]] : `${data.xName} ${x[index]}`;
      for (const one of series.slice(0, 16)) {
        const row = document.createElement("div");
        row.textContent = `${one.name}: ${format(one.values[index])}`;
        tip.append(row);
      }
      tip.hidden = false;
      const place = (px(x[index]) / width) * box.width;
      tip.style.left = place > box.width / 2 ? `${place - tip.offsetWidth}px` : `${place + 24}px`;
      tip.style.top = "44px";
    };
  }

  return { draw, colour, number };
})();
