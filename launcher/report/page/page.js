"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const views = new Map();
  const states = new Map();
  let picked = -1;
  let frame = data.frames ? data.frames.list.length - 1 : 0;

  // Tables travel as columns, which is smaller.
  const cache = new Map();
  function rows(name, needs) {
    if (name === "cells") return cells();
    if (name === "edges" && data.frames) return edges();
    if (!cache.has(name)) {
      const columns = data.tables[name] || {};
      const keys = Object.keys(columns);
      const count = keys.length ? columns[keys[0]].length : 0;
      const made = new Array(count);
      for (let i = 0; i < count; i++) {
        const row = {};
        for (const key of keys) row[key] = columns[key][i];
        made[i] = row;
      }
      cache.set(name, made);
    }
    const made = cache.get(name);
    return (needs ? made.filter((row) => row[needs] !== null) : made).map((row) => ({ ...row }));
  }

  function cells() {
    const { order, list } = data.frames;
    const made = [];
    list[frame].cells.forEach((value, k) => {
      if (value >= 0) {
        made.push({ row: order[Math.floor(k / order.length)], column: order[k % order.length], w: value / 1000 });
      }
    });
    return made;
  }

  function edges() {
    const { order, list } = data.frames;
    const size = order.length;
    const places = new Map(rows("nodes").map((node) => [node.peer, node]));
    const found = [];
    for (let i = 0; i < size; i++) {
      for (let j = i + 1; j < size; j++) {
        const value = Math.max(list[frame].cells[i * size + j], list[frame].cells[j * size + i]);
        if (value > 0) found.push([value, places.get(order[i]), places.get(order[j])]);
      }
    }
    found.sort((a, b) => b[0] - a[0]);
    const highest = data.frames.highest * 1000;
    return found.slice(0, 1500).map(([value, a, b]) => ({
      x: a.x, y: a.y, x2: b.x, y2: b.y, value: value / 1000, strength: Math.min(1, value / highest),
      pair: `${a.peer} – ${b.peer}`,
    }));
  }

  function theme() {
    const style = getComputedStyle(document.documentElement);
    const color = (name) => style.getPropertyValue(name).trim();
    const [text, quiet, line, card, accent] = ["--text", "--quiet", "--line", "--card", "--accent"].map(color);
    const isDark = dark.matches;
    const strong = isDark ? "#ffcf5c" : "#c2410c";
    const ramp = isDark ? ["#1d232b", "#22456b", "#3f86c9", "#b8dcff"] : ["#f3f6fa", "#b7d3ee", "#4a8fca", "#0a3d73"];
    return {
      background: card,
      font: "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif",
      axis: { labelColor: quiet, titleColor: quiet, gridColor: line, domainColor: line, tickColor: line,
        labelFontSize: 11, titleFontSize: 12, titleFontWeight: "normal", gridOpacity: 0.6 },
      legend: { labelColor: text, titleColor: quiet, titleFontWeight: "normal", labelFontSize: 11,
        symbolBaseFillColor: quiet },
      view: { stroke: null },
      range: {
        category: isDark
          ? ["#7cb7ff", "#ffb454", "#6fdc9f", "#f598c8", "#c9a7ff", "#f2e36b", "#63d8d6", "#ff8f80", "#b0bac5", "#d4a373"]
          : ["#1f6fbf", "#d9740b", "#26855a", "#b83280", "#7048b8", "#8a7500", "#0d8a8f", "#c23b2e", "#5f6b76", "#8a5a2b"],
        heatmap: ramp, ramp,
      },
      colors: { text, quiet, card, accent, strong, on: isDark ? "#0b0e12" : "#ffffff", off: text },
    };
  }

  // "@text" and the like in a specification stand for colors.
  const themed = (value, colors) => {
    if (typeof value === "string") return value[0] === "@" ? colors[value.slice(1)] ?? value : value;
    if (Array.isArray(value)) return value.map((item) => themed(item, colors));
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, themed(item, colors)]));
    }
    return value;
  };

  async function render(key) {
    const chart = data.charts[key];
    const state = states.get(key);
    const place = state.figure.querySelector(".chart");
    const width = place.clientWidth;
    if (!width) return;
    const { colors, ...config } = theme();
    const spec = themed(chart.variants[state.variant].spec, colors);
    const view = await window.vegaEmbed(place, {
      $schema: "https://vega.github.io/schema/vega-lite/v6.json",
      ...spec,
      width,
      height: chart.height || Math.min(width, 480),
      autosize: { type: "fit", contains: "padding" },
      padding: { left: 2, top: 6, right: 8, bottom: 4 },
      datasets: Object.fromEntries(chart.tables.map((name) => [name, rows(name, name === "rounds" && chart.needs)])),
      config,
    }, {
      actions: false, ast: true, logLevel: 1, renderer: chart.canvas ? "canvas" : "svg",
      tooltip: { theme: "custom" }, loader: { load: () => Promise.reject(new Error("no network")) },
    });
    views.get(key)?.finalize();
    views.set(key, view);
    state.width = width;
    state.rendered = true;
    const signals = view.view.getState({ signals: (name) => name === "picked" || name === chart.param }).signals;
    if ("picked" in signals) view.view.signal("picked", picked);
    if (chart.param && chart.param in signals) view.view.signal(chart.param, state.param);
    await view.view.runAsync();
  }

  // One at a time, so that the page stays responsive; what was asked for again meanwhile is drawn once.
  const queue = new Set();
  let busy = null;
  function draw(key) {
    queue.add(key);
    busy ??= (async () => {
      while (queue.size) {
        const [next] = queue;
        queue.delete(next);
        await render(next);
        await new Promise((done) => setTimeout(done));
      }
      busy = null;
    })();
    return busy;
  }

  const drawn = () => [...states].filter(([, state]) => state.rendered).map(([key]) => key);

  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const key = entry.target.dataset.chart;
      if (entry.isIntersecting && !states.get(key).rendered) draw(key);
    }
  }, { rootMargin: "100px" });

  for (const figure of document.querySelectorAll("figure[data-chart]")) {
    const key = figure.dataset.chart;
    states.set(key, { figure, variant: 0, param: -1, rendered: false, width: 0 });
    figure.querySelectorAll("fieldset.variants input").forEach((input) => input.addEventListener("change", () => {
      states.get(key).variant = Number(input.value);
      draw(key);
    }));
    const list = figure.querySelector("select");
    list?.addEventListener("change", () => {
      states.get(key).param = Number(list.value);
      views.get(key)?.view.signal(data.charts[key].param, Number(list.value)).runAsync();
    });
    seen.observe(figure);
  }

  const pick = document.getElementById("pick");
  pick?.addEventListener("change", () => {
    picked = Number(pick.value);
    for (const [key, view] of views) {
      if (JSON.stringify(data.charts[key].variants[0].spec.params || "").includes('"picked"')) {
        view.view.signal("picked", picked).runAsync();
      }
    }
    for (const row of document.querySelectorAll("#peers tbody tr")) {
      row.style.fontWeight = row.firstChild.textContent === String(picked) ? "700" : "";
    }
  });

  const slider = document.getElementById("round");
  if (slider && data.frames) {
    const output = document.getElementById("round-shown");
    const show = () => {
      frame = Number(slider.value);
      const text = `after round ${data.frames.list[frame].t}`;
      output.textContent = text;
      slider.setAttribute("aria-valuetext", text);
      for (const [key, table] of [["weights", "cells"], ["drawing", "edges"]]) {
        const view = views.get(key)?.view;
        view?.data(table, rows(table)).runAsync();
      }
    };
    slider.addEventListener("input", show);
    const play = document.getElementById("play");
    let timer = 0;
    const stop = () => { clearInterval(timer); timer = 0; play.textContent = "Play"; };
    play.addEventListener("click", () => {
      if (timer) return stop();
      if (frame === data.frames.list.length - 1) { slider.value = 0; show(); }
      play.textContent = "Pause";
      timer = setInterval(() => {
        if (frame >= data.frames.list.length - 1) return stop();
        slider.value = frame + 1;
        return show();
      }, Math.max(60, 6000 / data.frames.list.length));
    });
    slider.addEventListener("pointerdown", stop);
  }

  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") !== "descending" && (column > 0 || head.getAttribute("aria-sort") === "ascending");
      heads.forEach((other) => other.setAttribute("aria-sort", "none"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const value = (row) => {
        const text = row.cells[column].textContent.split(" ± ")[0];
        const parts = text.split(":");  // 1:02:03
        const units = { "": 1, k: 1e3, M: 1e6, G: 1e9, T: 1e12 };
        const size = /^(-?[\d.]+) ([kMGT]?)B$/.exec(text);
        if (size) return Number(size[1]) * units[size[2]];
        if (/^\d+(:\d\d)+$/.test(text)) return parts.reduce((sum, part) => 60 * sum + Number(part), 0);
        return text === "" || Number.isNaN(Number(text)) ? null : Number(text);
      };
      const compare = (a, b) => {
        const [x, y] = [value(a), value(b)];
        if (x === null || y === null) {
          if (x !== y) return x === null ? 1 : -1;
          const order = a.cells[column].textContent.localeCompare(b.cells[column].textContent);
          return down ? -order : order;
        }
        return down ? y - x : x - y;
      };
      const body = table.tBodies[0];
      [...body.rows].sort(compare).forEach((row) => body.append(row));
    }));
  }

  dark.addEventListener("change", () => drawn().forEach(draw));
  let resized = 0;
  window.addEventListener("resize", () => {
    clearTimeout(resized);
    resized = setTimeout(() => drawn().filter((key) => {
      const state = states.get(key);
      return Math.abs(state.figure.querySelector(".chart").clientWidth - state.width) > 4;
    }).forEach(draw), 150);
  });
  // Figures in view come first. The others follow, so that printing and searching find them.
  window.drawAll = () => Promise.all([...states].filter(([, state]) => !state.rendered).map(([key]) => draw(key)));
  window.addEventListener("load", () => setTimeout(window.drawAll, 1000));
})();
