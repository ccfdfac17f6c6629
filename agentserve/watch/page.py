"""The watch page: one HTML text without outside loads. It fetches its data from the server that sent it.

Foreign text (session names) only ever becomes text content. Colours are Okabe-Ito's.
"""

from __future__ import annotations

import orjson

from agentserve.watch.snapshot import FATE_TITLES, VICTIM_TITLES
from agentserve.watch.state import SHOWN

_STYLE = """
:root { --ink: #1b1b1b; --paper: #fff; --dim: #666; --line: #ddd; --hit: #0072b2; --in_flight: #e69f00;
  --lost: #d55e00; --new: #b8b8b8; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8e8; --paper: #16181b; --dim: #a0a0a0; --line: #3a3d42;
  --hit: #56b4e9; --new: #6a6a6a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 75rem; color: var(--ink); background: var(--paper);
  font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.25rem; margin: 0; } h2 { font-size: 1rem; margin: 1.4rem 0 .4rem; }
header { display: flex; flex-wrap: wrap; gap: .3rem 1rem; align-items: baseline; }
.dim, small { color: var(--dim); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .6rem; margin-top: .8rem; }
.tile { border: 1px solid var(--line); border-radius: 6px; padding: .5rem .7rem; }
.tile b { display: block; font-size: 1.5rem; font-variant-numeric: tabular-nums; }
.bar { display: flex; height: 1.1rem; border-radius: 3px; overflow: hidden; background: var(--line); }
.bar i { display: block; } .hit { background: var(--hit); } .in_flight { background: var(--in_flight); }
.lost { background: var(--lost); } .new { background: var(--new); }
.key { display: inline-block; width: .8rem; height: .8rem; border-radius: 2px; margin-right: .4rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .25rem .5rem; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; overflow-wrap: anywhere; min-width: 7rem; }
@media (max-width: 40rem) { table { font-size: .85rem; } th, td { padding: .2rem .3rem; } }
td:not(:first-child) { white-space: nowrap; } th { font-weight: 600; } svg { width: 100%; height: 7rem; display: block;
  border: solid var(--line); border-width: 1px 0; }
#trouble { color: var(--lost); font-weight: 600; } ul { padding-left: 1.1rem; margin: .3rem 0; }
input, button { font: inherit; padding: .2rem .5rem; } form { display: flex; flex-wrap: wrap; gap: .5rem; }
td button { font-size: .85rem; padding: 0 .4rem; }
"""

_SCRIPT = """
'use strict';
const base = location.pathname.replace(/(agentserve|metrics)\\/watch\\/?$/, 'agentserve/watch');
const el = id => document.getElementById(id);
const number = n => Math.round(n).toLocaleString('en');
const span = t => t < 100 ? Math.round(t) + ' s' : Math.round(t / 60) + ' min';
const share = x => x === null ? '-' : (100 * x).toFixed(2) + ' %';
const make = (tag, text, kind) => {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (kind) node.className = kind;
  return node;
};
const row = (cells, tag) => {
  const line = make('tr');
  for (const cell of cells) line.append(cell instanceof Node ? cell : make(tag || 'td', cell));
  return line;
};
const fill = (id, nodes) => el(id).replaceChildren(...nodes);
const headers = id => el(id).value ? {Authorization: 'Bearer ' + el(id).value} : {};

function tiles(s) {
  const w = s.windows[0], n = s.now;
  const all = [
    [share(w.hit_rate), 'hit rate, last ' + span(w.covered_s)],
    [share(w.possible_rate), 'possible without a limit of memory'],
    [number(n.running) + ' / ' + number(n.queued), 'requests running / queued'],
    [share(n.kv_usage), 'of ' + number(n.kv_tokens) + ' KV tokens held by running requests'],
    [number(s.sessions_known), 'sessions known'],
    [number(n.sessions_waiting) + ' / ' + number(n.sessions_parked), 'sessions that wait to start / are parked'],
  ];
  fill('tiles', all.map(([value, text]) => {
    const tile = make('div', undefined, 'tile');
    tile.append(make('b', value), make('small', text));
    return tile;
  }));
}

function fates(s) {
  // A server that is younger than the longer windows has the same in each of them.
  const apart = s.windows.filter((w, i) => !i || Math.round(w.covered_s) > Math.round(s.windows[i - 1].covered_s));
  const spans = [...apart.map(w => ['last ' + span(w.covered_s), w]), ['since start', s.since_start]];
  fill('fates', [
    row(['prompt tokens', ...spans.map(x => x[0])], 'th'),
    row(['hit rate', ...spans.map(x => share(x[1].hit_rate))]),
    ...Object.entries(FATES).map(([fate, title]) => {
      const name = make('td');
      const key = make('span', undefined, 'key ' + fate);
      name.append(key, title);
      return row([name, ...spans.map(x => number(x[1].fates[fate]))]);
    }),
  ]);
  const w = s.windows[1];
  fill('bar', Object.keys(FATES).map(fate => {
    const part = make('i', undefined, fate);
    part.style.width = (w.prompt_tokens ? 100 * w.fates[fate] / w.prompt_tokens : 0) + '%';
    part.title = FATES[fate] + ': ' + number(w.fates[fate]);
    return part;
  }));
}

function pairs(id, title, values, names) {
  const rows = Object.entries(values).filter(x => x[1]).sort((a, b) => b[1] - a[1]);
  const body = rows.length ? rows.map(([name, n]) => row([(names || {})[name] || name, number(n)]))
    : [row(['none', ''])];
  fill(id, [row([title, 'tokens'], 'th'), ...body]);
}

function line(points, value, top) {
  const first = points[0].at, last = points[points.length - 1].at || 1;
  return points.filter(p => value(p) !== null).map(p =>
    (600 * (p.at - first) / Math.max(1, last - first)).toFixed(1) + ',' + (100 - 100 * value(p) / top).toFixed(1)
  ).join(' ');
}

function series(s) {
  const svg = document.createElementNS('http://www.w3.org/2000/svg', 'svg');
  svg.setAttribute('viewBox', '0 0 600 100');
  svg.setAttribute('preserveAspectRatio', 'none');
  svg.setAttribute('role', 'img');
  svg.setAttribute('aria-label', 'hit rate, possible rate and KV cache held by running requests over time');
  const curves = [[p => p.possible_rate, '--in_flight', '6 4'], [p => p.hit_rate, '--hit', ''],
    [p => p.kv_usage, '--new', '2 3']];
  if (s.series.length > 1) for (const [value, colour, dash] of curves) {
    const curve = document.createElementNS('http://www.w3.org/2000/svg', 'polyline');
    curve.setAttribute('points', line(s.series, value, 1));
    curve.setAttribute('fill', 'none');
    curve.setAttribute('stroke-width', '2');
    curve.setAttribute('vector-effect', 'non-scaling-stroke');
    if (dash) curve.setAttribute('stroke-dasharray', dash);
    curve.style.stroke = 'var(' + colour + ')';
    svg.append(curve);
  }
  fill('series', [svg]);
  const seen = s.series.length > 1 ? s.series[s.series.length - 1].at - s.series[0].at : 0;
  el('spanned').textContent = seen ? 'left to right: the last ' + span(seen) : 'nothing yet: a few seconds more';
}

function sessions(s) {
  const rows = s.schedulers.flatMap(x => x.sessions);
  const counts = Object.entries(s.session_states).map(([k, n]) => n + ' ' + k.replace('_', ' ')).join(', ');
  el('counts').textContent = rows.length ? counts : 'none are known here';
  const act = s.server.can_act && el('admin-key').value;
  fill('sessions', rows.length ? [
    row(['session', 'state', 'context, tokens', 'idle, s', 'flows', ...(act ? [''] : [])], 'th'),
    ...rows.map(x => {
      const state = x.state.replace('_', ' ') + (x.admission === 'started' ? '' : ', ' + x.admission);
      const cells = [x.session, state, number(x.context), number(x.idle_s), x.flows];
      if (act) {
        const cell = make('td'), button = make('button', 'end');
        button.onclick = () => post('close?session=' + encodeURIComponent(x.session));
        cell.append(button);
        cells.push(cell);
      }
      return row(cells);
    })] : []);
  el('flush').disabled = !act;
  el('may').textContent = s.server.can_act ? 'enter the admin key to end sessions or to flush the cache'
    : 'read-only: the server has no admin key (--admin-api-key)';
}

async function post(action) {
  const answer = await fetch(base + '/' + action, {method: 'POST', headers: headers('admin-key')});
  const said = await answer.json();
  el('said').textContent = answer.ok ? 'done' : said.error || 'refused';
  await look();
}

async function look() {
  try {
    const answer = await fetch(base + '.json', {headers: headers('key')});
    if (answer.status === 401) throw new Error('this server wants a key: enter it below');
    if (!answer.ok) throw new Error('the server answers ' + answer.status);
    const s = await answer.json();
    el('model').textContent = s.server.model;
    el('policy').textContent = s.server.policy ? s.server.policy + ', admission ' + s.server.admission
      : "SGLang's " + s.server.sglang_policy;
    el('facts').textContent = 'page ' + s.server.page_size + ', tp ' + s.server.tp + ', offload '
      + (s.now.offload_online === null ? 'none' : s.now.offload_online ? 'in use' : 'daemon away');
    tiles(s); fates(s); series(s); sessions(s);
    const w = s.windows[1];
    pairs('victims', 'evicted from (5 min)', w.evicted_by_victim, VICTIMS);
    pairs('tiers', 'cached, by tier (5 min)', w.cached_by_tier);
    pairs('offload', 'offload (5 min)', {...w.offload, ...Object.fromEntries(
      Object.entries(w.offload_lookups).map(([k, n]) => ['lookups: ' + k, n]))});
    fill('evidence', s.evidence.map(text => make('li', text)));
    el('trouble').textContent = '';
    el('at').textContent = new Date(1000 * s.at_unix).toLocaleTimeString();
    document.body.dataset.looks = 1 + Number(document.body.dataset.looks || 0);
  } catch (error) {
    el('trouble').textContent = String(error.message || error);
  }
}

el('admin').onsubmit = event => { event.preventDefault(); look(); };
el('flush').onclick = () => post('flush');
look();
setInterval(() => { if (!document.hidden) look(); }, 2000);
"""

_BODY = """
<header><h1>agentserve watch</h1><span id="model"></span><span>policy <b id="policy"></b></span>
<span class="dim" id="facts"></span><span class="dim">at <span id="at"></span></span></header>
<p id="trouble" role="alert"></p>
<div class="tiles" id="tiles"></div>
<h2>Hit rate over time</h2>
<div id="series"></div>
<small><span id="spanned"></span>;
solid: hit rate of prompt tokens; dashed: possible without a limit of memory; dotted: KV cache
held by running requests; 0 to 100 %</small>
<h2>What became of prompt tokens</h2>
<div class="bar" id="bar"></div><small>last five minutes</small>
<div class="wide"><table id="fates"></table></div>
<h2>Evictions and tiers</h2>
<div class="wide"><table id="victims"></table><table id="tiers"></table><table id="offload"></table></div>
<h2>Sessions</h2><small id="counts"></small>
<div class="wide"><table id="sessions"></table></div>
<h2>What this rests on</h2><ul class="dim" id="evidence"></ul>
<h2>Keys</h2>
<form id="admin"><input id="key" type="password" autocomplete="off" placeholder="API key, where one is wanted"
aria-label="API key"><input id="admin-key" type="password" autocomplete="off" placeholder="admin key"
aria-label="admin key"><button>use</button><button type="button" id="flush" disabled>flush the cache</button>
<small id="may"></small><small id="said"></small></form>
"""


def _html() -> str:
    inline = "'unsafe-inline'"
    policy = f"default-src 'none'; connect-src 'self'; style-src {inline}; script-src {inline}; img-src data:"
    tables = f"const FATES = {orjson.dumps(FATE_TITLES).decode()}, VICTIMS = {orjson.dumps(VICTIM_TITLES).decode()};"
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>agentserve watch</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}"><link rel="icon" href="data:,">'
        f"<style>{_STYLE}</style></head><body>{_BODY}"
        f"<small>at most {SHOWN} sessions are listed</small><script>{tables}{_SCRIPT}</script></body></html>"
    )


HTML = _html()
