"""Style and script of the page, inlined into it: it must work from a disk without any network."""

from __future__ import annotations

# Everything is inline, so the policy can forbid every load; a forgotten outside link then fails loudly.
CONTENT_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'"
)

CSS = """
:root { color-scheme: light dark; --bg: #fff; --fg: #1b1f24; --dim: #57606a; --line: #d8dee4; --card: #f6f8fa;
  --accent: #0072B2; --warn-bg: #fdeee4; --warn: #a84300; }
@media (prefers-color-scheme: dark) { :root { --bg: #14171b; --fg: #e6e9ed; --dim: #9aa4af; --line: #323940;
  --card: #1d2127; --accent: #56B4E9; --warn-bg: #3a2415; --warn: #ffb27d; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--bg); color: var(--fg); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 24px 20px 60px; }
h1 { font-size: 1.45rem; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 1.12rem; margin: 36px 0 8px; }
p { margin: 4px 0; }
.dim, figcaption, .def { color: var(--dim); font-size: .87rem; overflow-wrap: anywhere; }
.answer { font-size: 1.05rem; margin: 8px 0 12px; }
.banner { border: 1px solid var(--warn); border-left-width: 6px;
  background: var(--warn-bg); color: var(--warn);
  border-radius: 6px; padding: 10px 14px; margin: 16px 0; font-weight: 600; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px;
  margin: 18px 0 6px; }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 10px 14px; }
.tile b { display: block; font-size: 1.5rem; font-variant-numeric: tabular-nums; white-space: nowrap; }
.tile.realized b { color: var(--accent); }
.tile span { color: var(--dim); font-size: .85rem; }
figure { margin: 0; } figcaption { margin-top: 8px; }
.plot { width: 100%; min-width: 0; }
.grid { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 8px 28px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { text-align: left; padding: 5px 10px 5px 0; border-bottom: 1px solid var(--line);
  vertical-align: top; }
th { color: var(--dim); font-weight: 600; white-space: nowrap; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; padding-left: 10px; }
td.id { overflow-wrap: anywhere; min-width: 4.5em; }
td.def { padding: 0 0 8px; font-size: .84rem; }
tr:has(+ tr.more) td { border-bottom: 0; padding-bottom: 1px; }
tr.strong td { font-weight: 600; }
tr.sub td { color: var(--dim); }
details { margin: 10px 0; } summary { cursor: pointer; color: var(--accent); }
@media (max-width: 800px) { .grid { grid-template-columns: minmax(0, 1fr); } }
@media (max-width: 480px) { table { font-size: .82rem; } th, th.n { white-space: normal; } td.id { min-width: 7.5em; }
  td.n, th.n { padding-left: 4px; padding-right: 6px; }
  main { padding: 14px 12px 40px; } .tile b { font-size: 1.2rem; }
  .tiles { grid-template-columns: repeat(2, 1fr); gap: 8px; } .tile { padding: 8px 10px; } }
@media print { :root { color-scheme: light; --bg: #fff; --fg: #000; --dim: #444; --line: #bbb; --card: #fff;
  --accent: #0072B2; --warn-bg: #fff; --warn: #a84300; }
  main { max-width: none; padding: 0; } figure, .tile, tr { break-inside: avoid; } h2 { break-after: avoid; }
  .scroll { overflow: visible; } .grid { grid-template-columns: minmax(0, 1fr); } }
"""

JS = """
(function () {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const narrow = window.matchMedia("(max-width: 480px)");
  const AXIS = /^[xy]axis[0-9]*$/;

  function themed(layout, isDark) {
    const fg = isDark ? "#e6e9ed" : "#1b1f24", grid = isDark ? "#2b3138" : "#e4e8ec";
    const out = Object.assign({}, layout, {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", autosize: true,
      font: { color: fg, size: narrow.matches ? 11 : 12, family: "system-ui, sans-serif" },
      margin: narrow.matches ? { l: 50, r: 10, t: 24, b: 48 } : { l: 64, r: 20, t: 24, b: 52 },
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { color: fg } },
      hoverlabel: { align: "left" },
    });
    for (const key of Object.keys(out)) {
      if (!AXIS.test(key)) continue;
      out[key] = Object.assign({ showgrid: true, zeroline: false, automargin: true }, out[key], {
        gridcolor: grid, linecolor: grid, tickcolor: grid,
      });
    }
    return out;
  }

  // In a PDF each bar's pattern is a set of pictures, tens of megabytes in all: on paper patterns are shades.
  const SHADES = { "/": 0.6, x: 0.35 };
  function plain(f) {
    return f.data.map(t => !t.marker || !t.marker.pattern || !t.marker.pattern.shape ? t
      : Object.assign({}, t, { marker: Object.assign({}, t.marker,
        { pattern: { shape: "" }, opacity: SHADES[t.marker.pattern.shape] || 0.5 }) }));
  }

  let printed = false;  // paper has a width of its own, so that the queries change while a page is printed
  function drawAll() {
    for (const f of figures) {
      const layout = themed(JSON.parse(JSON.stringify(f.layout)), dark.matches && !printed);
      Plotly.react(f.id, printed ? plain(f) : f.data, layout, {
        responsive: true, displaylogo: false, displayModeBar: false,
      });
    }
  }

  drawAll();
  dark.addEventListener("change", drawAll);
  narrow.addEventListener("change", drawAll);
  window.addEventListener("beforeprint", () => { printed = true; drawAll(); });
  window.addEventListener("afterprint", () => { printed = false; drawAll(); });
})();
"""
