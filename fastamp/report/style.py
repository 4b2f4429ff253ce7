"""How a report looks: on a wide and a narrow screen, in light and dark."""

_SHADES = "".join(
    # From the page's own background to the accent; the darker half has text that can be read on it.
    f".matrix td.h{step}{{background:color-mix(in srgb,var(--heat) {6 + 9 * step}%,var(--card))}}"
    for step in range(10)
)

STYLE = (
    """
:root{color-scheme:light dark;--page:#f5f6f8;--card:#fff;--text:#1b1f24;--soft:#57606a;--edge:#d8dee4;--grid:#e6eaee;
--accent:#0b57d0;--good:#1a7f37;--bad:#cf222e;--heat:#54aeff;
--c0:#0b57d0;--c1:#c2410c;--c2:#1a7f37;--c3:#8250df;--c4:#bf3989;--c5:#0e7490;--c6:#8a6100;--c7:#57606a}
@media (prefers-color-scheme:dark){:root{--page:#0f1318;--card:#181d24;--text:#e6edf3;--soft:#9aa5b1;--edge:#303842;
--grid:#272e37;--accent:#7cb3ff;--good:#4ac26b;--bad:#ff7b72;--heat:#1a60cc;
--c0:#7cb3ff;--c1:#ffa657;--c2:#4ac26b;--c3:#c297ff;--c4:#f778ba;--c5:#56d4dd;--c6:#e3b341;--c7:#9aa5b1}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%;scroll-behavior:smooth}
@media (prefers-reduced-motion:reduce){html{scroll-behavior:auto}}
body{margin:0 auto;max-width:1240px;padding:28px 20px 60px;background:var(--page);color:var(--text);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;overflow-wrap:anywhere}
h1{margin:0;font-size:1.75rem;line-height:1.2}
h2{margin:0 0 14px;font-size:1.25rem;line-height:1.3}
h3{margin:26px 0 6px;font-size:1rem}
h3.over+p+h3{margin-top:12px}
p{margin:6px 0}
a{color:var(--accent)}
a:focus-visible,.scroll:focus-visible{outline:2px solid var(--accent);outline-offset:2px}
code{font:.86em/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
.kind{margin:0 0 2px;color:var(--soft);font-size:.8rem;letter-spacing:.08em;text-transform:uppercase}
.note{color:var(--soft);font-size:.88rem}
.protocol{margin-top:12px;max-width:80ch}
nav ul{display:flex;flex-wrap:wrap;gap:8px;margin:16px 0 0;padding:0;list-style:none}
nav a{display:block;padding:5px 12px;border:1px solid var(--edge);border-radius:99px;background:var(--card);
font-size:.88rem;text-decoration:none}
nav a:hover{border-color:var(--accent)}
section{margin-top:22px;padding:22px;border:1px solid var(--edge);border-radius:12px;background:var(--card)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(118px,1fr));gap:10px;margin:0 0 10px}
.tiles div{padding:10px 14px;border:1px solid var(--edge);border-radius:10px;background:var(--page)}
.tiles dt{color:var(--soft);font-size:.85rem}
.tiles dd{margin:0;font-size:1.7rem;font-weight:650;line-height:1.25;font-variant-numeric:tabular-nums}
.tiles .unit{font-size:.9rem;font-weight:400}
.tiles .interval{display:block;color:var(--soft);font-size:.8rem;font-weight:400}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,340px),1fr));gap:22px;margin-top:18px}
.chart{margin:0;min-width:0}
.chart figcaption{margin-bottom:4px;font-size:.95rem;font-weight:600}
.drawing{display:block;width:100%;height:auto;max-width:520px}
.drawing text{fill:var(--soft);font-size:11px}
.grid{stroke:var(--grid)}
.axis{stroke:var(--soft)}
.line{fill:none;stroke-width:2;stroke-linejoin:round}
.area{fill-opacity:.2;stroke:none}
.legend{display:flex;flex-wrap:wrap;gap:2px 14px;margin:4px 0 0;padding:0;list-style:none;font-size:.82rem}
.legend li{display:flex;align-items:center;gap:6px}
.legend svg{flex:none}
.chart .note{margin:4px 0 0;font-size:.8rem}
.scroll{max-width:100%;overflow-x:auto}
table{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums}
caption{padding:16px 0 4px;font-weight:600;text-align:left}
th,td{padding:6px 16px 6px 0;border-bottom:1px solid var(--edge);text-align:left;vertical-align:top}
table{overflow-wrap:normal}
th{color:var(--soft);font-size:.82rem;font-weight:600}
td code{display:inline-block;min-width:11ch;max-width:44ch;overflow-wrap:anywhere}
td span>code{max-width:none;white-space:nowrap}
td small{display:block;min-width:24ch;max-width:62ch;color:var(--soft);font-size:.8rem}
.matrix th,.matrix td{min-width:44px;white-space:nowrap;padding:6px 8px;border:1px solid var(--card);text-align:center}
.matrix thead th:first-child{min-width:0;white-space:normal}
.matrix th[scope=row],.matrix thead th:first-child{text-align:left}
.facts{margin:0}
.facts div{display:grid;grid-template-columns:minmax(120px,170px) 1fr;gap:12px;padding:5px 0;
border-bottom:1px solid var(--edge)}
.facts dt{color:var(--soft)}
.facts dd{margin:0}
.list{margin:0 0 14px}
.list figcaption{margin-bottom:4px;font-size:.86rem}
.ranks{display:flex;gap:8px;margin:0;padding:2px;list-style:none}
.ranks li{flex:none;font-size:.75rem;line-height:1.35;text-align:center}
.ranks li>span{display:block;white-space:nowrap}
.ranks li:first-child{margin-right:10px}
.frame{padding:2px;border:3px solid var(--soft);border-radius:5px}
.frame.correct{border-color:var(--good)}
.frame.wrong{border-color:var(--bad)}
.frame img,.missing{display:block;margin:0 auto}
.missing{width:72px;height:72px;color:var(--soft);white-space:normal}
span.correct{color:var(--good);font-weight:600}
span.wrong{color:var(--bad);font-weight:600}
@media (max-width:600px){body{padding:18px 12px 40px}section{padding:16px 14px;border-radius:10px}
h1{font-size:1.35rem}.facts div{grid-template-columns:1fr;gap:0}.tiles{grid-template-columns:repeat(2,1fr)}
th,td{padding-right:10px}
#config table,#config thead,#config tbody{display:block}#config tr{display:grid;grid-template-columns:1fr 1fr}
#config th:first-child,#config td:first-child{grid-column:1/-1;padding-bottom:0;border-bottom:0}
#config code,#config small{min-width:0;max-width:none;white-space:normal}
.matrix th,.matrix td{min-width:38px;padding:6px 5px}}
@media print{body{background:none}section{break-inside:avoid}}
"""
    + "".join(
        f".line.c{number}{{stroke:var(--c{number})}}.area.c{number},.dot.c{number}{{fill:var(--c{number})}}\n"
        for number in range(8)
    )
    # Lines differ in more than colour.
    + ".line.c1{stroke-dasharray:7 3}.line.c2{stroke-dasharray:2 3}.line.c3{stroke-dasharray:9 3 2 3}\n"
    + ".line.c4{stroke-dasharray:12 4}.line.c5{stroke-dasharray:4 2}\n"
    + _SHADES
    + "\n"
)
