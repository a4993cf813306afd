"""How the page of a run looks, on top of the plan's page, and the cursor that reads its charts. Nothing is fetched."""

STYLE = """
:root { --a: #0072b2; --b: #e69f00; --c: #009e73; --d: #d55e00; --e: #cc79a7; --wait: #c9ced4; --band: .22; }
@media (prefers-color-scheme: dark) { :root { --a: #56b4e9; --b: #e69f00; --c: #33c29a; --d: #ff8a4c; --e: #e0a3c4;
  --wait: #4a535c; --band: .3; } }
* { box-sizing: border-box; } body { margin: 1rem auto; } figure { margin: 1.4rem 0 0; }
figcaption { display: flex; flex-wrap: wrap; gap: .1rem 1.1rem; align-items: baseline; }
.small { font-size: .85rem; margin: 0; } .key1 { font-size: .9rem; }
output { font-variant-numeric: tabular-nums; font-weight: 600; }
.sample { width: 26px; height: 8px; vertical-align: middle; margin-right: .3rem; }
.plot { position: relative; border-left: 1px solid var(--line); border-bottom: 1px solid var(--line); margin: .2rem 0; }
.plot svg { position: absolute; inset: 0; width: 100%; height: 100%; }
.plot span { position: absolute; left: .3rem; font-size: .75rem; color: var(--soft); background: var(--paper);
  opacity: .85; padding: 0 .2rem; pointer-events: none; } .plot span:empty { display: none; }
.plot .top { top: 0; } .plot .bottom { bottom: 0; }
.line { fill: none; stroke-width: 1.8; vector-effect: non-scaling-stroke; } .band { opacity: var(--band); }
.level { stroke: var(--soft); stroke-dasharray: 3 3; vector-effect: non-scaling-stroke; }
.happened { stroke: var(--soft); stroke-width: 1; stroke-dasharray: 1 3; vector-effect: non-scaling-stroke; }
.line.a { stroke: var(--a); } .line.b { stroke: var(--b); } .line.c { stroke: var(--c); } .line.d { stroke: var(--d); }
.band.a, .fill.a { fill: var(--a); } .band.b, .fill.b { fill: var(--b); } .band.c, .fill.c { fill: var(--c); }
.band.d, .fill.d { fill: var(--d); } .fill.wait { fill: var(--wait); }
.cursor { position: absolute; top: 0; bottom: 0; width: 0; border-left: 1.5px solid var(--ink); pointer-events: none; }
.ticks { display: flex; justify-content: space-between; font-size: .75rem; color: var(--soft); }
figure, .worker { display: grid; grid-template-columns: 11rem minmax(0, 1fr); gap: 0 .8rem; }
figure.rows { display: block; } figure > figcaption { align-content: start; } .worker { margin-top: .5rem; }
.marks, .ticks { margin-left: 11.8rem; } figcaption .small { flex-basis: 100%; }
.worker > div:first-child { font-size: .85rem; } .worker .plot { margin: 0; }
.marks { position: relative; height: 1.5rem; } .marks a, ol.told b { display: inline-block; min-width: 1.2rem;
  text-align: center; font: 600 .7rem/1.2rem system-ui, sans-serif; color: var(--paper); background: var(--ink);
  border-radius: .6rem; padding: 0 .25rem; text-decoration: none; } .marks a { position: absolute;
  transform: translateX(-50%); } .marks a.dot { min-width: .35rem; width: .35rem; height: .35rem; padding: 0;
  top: .45rem; background: var(--soft); } ol.told { list-style: none; padding: 0; }
.ways { display: flex; height: 1.5rem; } .ways i { border-right: 1px solid var(--paper); overflow: hidden;
  font: .75rem/1.5rem system-ui, sans-serif; white-space: nowrap; padding-left: .2rem; color: #fff; min-width: 0; }
.ways i.k0 { background: #00527f; } .ways i.k1 { background: #8a4a00; } .ways i.k2 { background: #00664a; }
.ways i.k3 { background: #7a3560; } .ways i.none { background: var(--wait); color: var(--ink); }
.interval { position: relative; height: 1.4rem; min-width: 10rem; background: linear-gradient(var(--line), var(--line))
  50% 50% / 1px 100% no-repeat; } .interval i { position: absolute; top: .55rem; height: .3rem; background: var(--a);
  opacity: .5; } .interval b { position: absolute; top: .35rem; width: .7rem; height: .7rem; background: var(--d);
  transform: translateX(-50%) rotate(45deg); }
#now { position: sticky; top: 0; background: var(--paper); padding: .3rem 0; z-index: 1; min-height: 2rem;
  border-bottom: 1px solid var(--line); font-variant-numeric: tabular-nums; }
@media (max-width: 40rem) { figure, .worker { grid-template-columns: minmax(0, 1fr); }
  .marks, .ticks { margin-left: 0; } body { padding: 0 .6rem; }
  .interval, .scale { display: none; } }
"""

SCRIPT = """
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const say = {
    s: v => v < 1e-3 ? (v * 1e6).toFixed(0) + " \\u00b5s" : v < 1 ? (v * 1e3).toPrecision(3) + " ms"
      : v < 60 ? v.toPrecision(3) + " s" : Math.floor(v / 3600) ? Math.floor(v / 3600) + " h "
      + String(Math.floor(v / 60) % 60).padStart(2, "0") + " min" : Math.floor(v / 60) + " min "
      + String(Math.round(v) % 60).padStart(2, "0") + " s",
    share: v => (100 * v).toPrecision(3) + " %",
    bytes: v => { let k = 0; while (v >= 999.5 && k < 4) { v /= 1000; k++; }
      return v.toPrecision(3) + " " + ["B", "kB", "MB", "GB", "TB"][k]; },
    number: v => Math.abs(v) >= 1000 ? Math.round(v).toLocaleString("en") : String(+v.toPrecision(4)),
  };
  const plots = [...document.querySelectorAll(".plot")];
  const outputs = [...document.querySelectorAll("output[data-series]")];
  const now = document.getElementById("now"), idle = now.textContent;
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
  document.documentElement.dataset.ready = "yes";
  if (location.hash.startsWith("#at=")) show(Number(location.hash.slice(4)));
})();
"""
