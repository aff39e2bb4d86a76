// Replaces the static drawings by charts with zoom, smoothing, log axes and values under the cursor.
(() => {
  "use strict";
  const data = JSON.parse(document.getElementById("data").textContent);
  const toolbar = document.getElementById("toolbar");
  if (!toolbar) return;
  const figures = [...document.querySelectorAll("figure.chart")];
  const AXES = { step: "step", epoch: "epoch", examples: "examples", seconds: "seconds of running time" };
  const HEIGHT = 256;
  const built = new Map(); // by figure: the chart, and the points of its lines
  let keepsZoom = true;
  const hidden = new Set(); // "chart/line" that a click has hidden

  const option = (name) => toolbar.elements[name];
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function short(value) {
    if (value === null || value === undefined || Number.isNaN(value)) return "–";
    const size = Math.abs(value);
    if (Number.isInteger(value) && size < 1e9) return value.toLocaleString("en-US");
    if (size !== 0 && (size < 1e-4 || size >= 1e9)) return value.toExponential(3).replace(/\.?0+e/, "e");
    return size >= 1e4 ? Math.round(value).toLocaleString("en-US") : String(Number(value.toPrecision(4)));
  }

  // x-axis: a page has steps, and points between which epochs and seconds are interpolated
  function interpolated(points, step, extends_) {
    if (!points.length) return null;
    let high = points.findIndex((point) => point[0] >= step);
    if (high >= 0 && points[high][0] === step) return points[high][1];
    if (high < 0 && !extends_) return points[points.length - 1][1];
    if (high < 0) high = points.length - 1;
    if (high === 0) return points[0][1];
    const [s0, v0] = points[high - 1], [s1, v1] = points[high];
    return v0 + ((v1 - v0) * (step - s0)) / (s1 - s0);
  }
  function position(line, step) {
    const run = data.runs[line.run];
    switch (option("x").value) {
      case "epoch": return interpolated(run.epochs, step, true);
      case "examples": return run.batch_size ? step * run.batch_size : null;
      case "seconds": return interpolated(run.seconds, step, false);
      default: return step;
    }
  }

  // The points of a line: ascending and distinct x, null for values that are not finite or not on a log axis.
  function pointsOf(line) {
    const xs = [], ys = [], logx = option("logx").checked, logy = option("logy").checked;
    line.steps.forEach((step, place) => {
      const x = position(line, step), y = line.values[place];
      if (x === null || (logx && x <= 0)) return;
      const shown = y !== null && logy && y <= 0 ? null : y;
      if (xs.length && x <= xs[xs.length - 1]) { ys[ys.length - 1] = shown; return; }
      xs.push(x);
      ys.push(shown);
    });
    return [xs, ys];
  }

  // exponential moving average without the bias of its start
  function smoothed(ys, weight) {
    let mean = 0, total = 0;
    return ys.map((y) => {
      if (y === null) return null;
      mean = weight * mean + (1 - weight) * y;
      total = weight * total + (1 - weight);
      return mean / total;
    });
  }

  function build(figure) {
    const chart = data.charts[Number(figure.dataset.chart)], plot = figure.querySelector(".plot");
    const weight = Number(option("smooth").value);
    const tables = [], series = [{}], lines = [];
    chart.lines.forEach((line, index) => {
      const [xs, ys] = pointsOf(line), isShown = !hidden.has(`${figure.dataset.chart}/${index}`);
      const colour = css(`--c${line.colour || 0}`);
      const smooth = weight > 0 && ys.length > 2 ? smoothed(ys, weight) : null;
      const style = { stroke: colour, dash: line.is_dashed ? [6, 4] : undefined, points: { show: xs.length < 2 }, show: isShown };
      lines.push({ xs, ys: smooth || ys });
      if (smooth || line.is_thin) {
        tables.push([xs, ys]);
        series.push({ ...style, width: 1, alpha: smooth ? 0.3 : 0.6, dash: smooth ? undefined : style.dash });
      }
      if (smooth || !line.is_thin) {
        tables.push([xs, smooth || ys]);
        series.push({ ...style, width: line.is_thin ? 1.2 : 2 });
      }
    });
    const old = built.get(figure);
    const zoom = old && keepsZoom && old.axis === axisKey() ? zoomOf(old.uplot) : null;
    if (old) old.uplot.destroy();
    plot.textContent = "";
    const isLog = option("logy").checked && lines.some((line) => line.ys.some((y) => y !== null && y > 0));
    // lines of a log axis over several powers of ten would fill the chart: only those of the powers
    const powers = (u, splits) => {
      const { min, max, distr } = u.scales.y;
      return distr === 3 && max / min >= 100 ? splits.map((y) => (Number.isInteger(Math.log10(y)) ? y : null)) : splits;
    };
    const axis = {
      stroke: css("--muted"), font: "11px system-ui, sans-serif", grid: { stroke: css("--edge"), width: 1 },
      ticks: { show: false }, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : short(tick))),
    };
    const options = {
      width: Math.max(200, plot.clientWidth), height: HEIGHT, series, legend: { show: false },
      scales: { x: { time: false, distr: option("logx").checked ? 3 : 1 }, y: { distr: isLog ? 3 : 1 } },
      axes: [{ ...axis, size: 24, gap: 3, grid: { show: false }, label: AXES[option("x").value], labelSize: 16, labelGap: 0, labelFont: axis.font }, { ...axis, size: 54, grid: { ...axis.grid, filter: powers } }],
      cursor: { sync: { key: "charts", scales: ["x", null] }, drag: { x: true, y: false }, points: { show: false }, y: false },
      hooks: { setCursor: [(u) => showValues(figure, u)], draw: [(u) => markBest(u, chart)] },
    };
    const joined = tables.some((table) => table[0].length) ? uPlot.join(tables) : [[], ...tables.map(() => [])];
    const uplot = new uPlot(options, joined, plot);
    built.set(figure, { uplot, lines, axis: axisKey() });
    if (zoom) uplot.setScale("x", zoom);
    showValues(figure, uplot);
  }
  const axisKey = () => `${option("x").value}/${option("logx").checked}`;
  function zoomOf(uplot) {
    const xs = uplot.data[0], { min, max } = uplot.scales.x;
    return xs.length > 1 && (min > xs[0] || max < xs[xs.length - 1]) ? { min, max } : null;
  }

  // The value of each line that is nearest to the cursor; without a cursor the last.
  function showValues(figure, uplot) {
    const found = built.get(figure);
    if (!found) return;
    const at = uplot.cursor.left >= 0 ? uplot.posToVal(uplot.cursor.left, "x") : Infinity;
    figure.querySelectorAll(".legend output").forEach((output, index) => {
      const { xs, ys } = found.lines[index];
      let low = 0, high = xs.length - 1;
      while (low < high) {
        const middle = (low + high) >> 1;
        if (xs[middle] < at) low = middle + 1; else high = middle;
      }
      if (low > 0 && at - xs[low - 1] < xs[low] - at) low -= 1;
      while (low > 0 && at === Infinity && ys[low] === null) low -= 1;
      output.textContent = short(ys[low]);
    });
    const caption = figure.querySelector("figcaption small");
    caption.textContent = at === Infinity ? "" : `${option("x").value} ${short(Number(at.toPrecision(5)))}`;
  }

  function markBest(uplot, chart) {
    chart.lines.forEach((line, index) => {
      const place = line.best === undefined ? -1 : line.steps.indexOf(line.best);
      if (place < 0 || hidden.has(`${data.charts.indexOf(chart)}/${index}`)) return;
      const x = position(line, line.best), y = line.values[place], { min, max } = uplot.scales.x;
      if (x === null || y === null || x < min || x > max || (uplot.scales.y.distr === 3 && y <= 0)) return;
      const context = uplot.ctx;
      context.save();
      context.beginPath();
      context.arc(uplot.valToPos(x, "x", true), uplot.valToPos(y, "y", true), 4 * devicePixelRatio, 0, 2 * Math.PI);
      context.fillStyle = css(`--c${line.colour || 0}`);
      context.fill();
      context.strokeStyle = css("--bg");
      context.lineWidth = 1.5 * devicePixelRatio;
      context.stroke();
      context.restore();
    });
  }

  function rebuild(keeps = true) {
    keepsZoom = keeps;
    built.forEach((_, figure) => build(figure));
    keepsZoom = true;
  }
  const onScreen = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting && !built.has(entry.target)) build(entry.target);
  }, { rootMargin: "400px" });
  const onSize = new ResizeObserver((entries) => {
    for (const entry of entries) {
      const found = built.get(entry.target.closest("figure"));
      const width = Math.floor(entry.contentRect.width);
      if (found && width >= 200 && width !== found.uplot.width) found.uplot.setSize({ width, height: HEIGHT });
    }
  });

  const can = {
    epoch: data.runs.some((run) => run.epochs.length > 1),
    examples: data.runs.some((run) => run.batch_size),
    seconds: data.runs.some((run) => run.seconds.length > 1),
  };
  for (const choice of option("x").options) choice.disabled = can[choice.value] === false;
  for (const figure of figures) {
    figure.querySelector("figcaption").append(document.createElement("small"));
    figure.querySelectorAll(".legend button").forEach((button, index) => {
      if (button.classList.contains("off")) hidden.add(`${figure.dataset.chart}/${index}`);
      button.addEventListener("click", () => {
        const key = `${figure.dataset.chart}/${index}`;
        if (!hidden.delete(key)) hidden.add(key);
        button.classList.toggle("off", hidden.has(key));
        build(figure);
      });
    });
    onScreen.observe(figure);
    onSize.observe(figure.querySelector(".plot"));
  }
  toolbar.addEventListener("submit", (event) => event.preventDefault());
  toolbar.addEventListener("input", (event) => {
    toolbar.querySelector("output").textContent = option("smooth").value;
    if (event.target.name !== "filter") return rebuild();
    const wanted = event.target.value.toLowerCase();
    for (const figure of figures) {
      figure.hidden = !data.charts[Number(figure.dataset.chart)].title.toLowerCase().includes(wanted);
    }
  });
  option("reset").addEventListener("click", () => rebuild(false));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => rebuild());
  toolbar.hidden = false;
})();
