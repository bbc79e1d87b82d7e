// Drawings of the dashboard, as SVG.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 300;
const HEIGHT = 40;

/** Draw `values`, oldest first, as a line over an area; `description` is read out. */
export function drawSparkline(svg, values, description) {
  const highest = Math.max(1, ...values);
  const step = WIDTH / Math.max(1, values.length - 1);
  const points = values.map((value, index) => {
    const y = HEIGHT - (value / highest) * (HEIGHT - 2) - 1;
    return `${(index * step).toFixed(1)} ${y.toFixed(1)}`;
  });
  svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
  svg.setAttribute("aria-label", description);
  path(svg, "area").setAttribute("d", `M0 ${HEIGHT}L${points.join("L")}L${WIDTH} ${HEIGHT}Z`);
  path(svg, "line").setAttribute("d", `M${points.join("L")}`);
}

/** Set the shares of a stacked bar, as parts of one, from the left. */
export function drawShares(svg, shares, description) {
  let start = 0;
  for (const [index, share] of shares.entries()) {
    const part = svg.children[index];
    part.setAttribute("x", String(start * 100));
    part.setAttribute("width", String(share * 100));
    start += share;
  }
  svg.setAttribute("aria-label", description);
}

function path(svg, name) {
  const existing = svg.querySelector(`.${name}`);
  if (existing) return existing;
  const created = document.createElementNS(SVG, "path");
  created.setAttribute("class", name);
  return svg.appendChild(created);
}
