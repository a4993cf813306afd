"""The cursor that reads a run's charts, by pointer or by keyboard. Nothing is fetched, and without it all is there."""

SCRIPT = """
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const say = {
    // As `hetopt.core.formatting` writes them: the unit is that of the rounded number.
    s: v => { const pair = (all, each, one, other) =>
        Math.floor(all / each) + one + (all % each ? " " + String(all % each).padStart(2, "0") + other : "");
      return v === 0 ? "0 s" : v < 999.5e-6 ? (v * 1e6).toFixed(0) + " \\u00b5s"
        : v < 0.9995 ? +(v * 1e3).toPrecision(3) + " ms" : v < 59.95 ? +v.toPrecision(3) + " s"
        : Math.round(v) < 3600 ? pair(Math.round(v), 60, " min", " s") : pair(Math.round(v / 60), 60, " h", " min"); },
    share: v => +(100 * v).toPrecision(3) + " %",
    bytes: v => { let k = 0; while (v >= 999.5 && k < 4) { v /= 1000; k++; }
      return +v.toPrecision(3) + " " + ["B", "kB", "MB", "GB", "TB"][k]; },
    number: v => Math.abs(v) >= 1000 ? Math.round(v).toLocaleString("en") : String(+v.toPrecision(4)),
  };
  const plots = [...document.querySelectorAll(".plot")];
  const outputs = [...document.querySelectorAll("output[data-series]")];
  const now = document.getElementById("said");
  const idle = now.textContent + " Point at a chart, or move the slider, to read it.";
  const slider = document.getElementById("moment");
  const index = time => { let low = 0, high = data.end_s.length - 1;
    while (low < high) { const mid = (low + high) >> 1; if (data.end_s[mid] < time) low = mid + 1; else high = mid; }
    return low; };
  const show = share => {
    const last = data.end_s[data.end_s.length - 1], at = index(share * last);
    now.textContent = say.s(share * last) + " after the first step, step " + say.number(data.step[at])
      + (data.way[at] ? ", " + data.ways[data.way[at] - 1] : "");
    for (const out of outputs) { const [unit, values] = data.series[out.dataset.series] || [];
      out.textContent = values && values[at] !== null ? say[unit](values[at]) : ""; }
    for (const plot of plots) { const line = plot.querySelector(".cursor"); line.hidden = false;
      line.style.left = 100 * share + "%"; }
  };
  const hide = () => { now.textContent = idle; for (const out of outputs) out.textContent = "";
    for (const plot of plots) plot.querySelector(".cursor").hidden = true; };
  for (const plot of plots) {
    plot.addEventListener("pointermove", event => { const box = plot.getBoundingClientRect();
      show(Math.min(1, Math.max(0, (event.clientX - box.left) / box.width))); });
    plot.addEventListener("pointerleave", hide);
  }
  slider.addEventListener("input", () => show(Number(slider.value) / 1000));
  slider.addEventListener("blur", hide);
  slider.hidden = false; now.textContent = idle;
  document.documentElement.dataset.ready = "yes";
  if (location.hash.startsWith("#at=")) show(Number(location.hash.slice(4)));
})();
"""
