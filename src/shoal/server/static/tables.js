// The rows of the batch and of the queue.

/** Show who runs and who waits; the rows of `ownRequestId` stand out. */
export function showRows(state, ownRequestId) {
  const requestCell = (cell, row) => showRequest(cell, row, row.request_id === ownRequestId);
  fill("batch", state.running, ownRequestId, [
    ["th", "request", requestCell],
    ["td", "phase", (cell, row) => setText(cell, row.phase)],
    ["td", "prompt", promptCell],
    ["td", "number", (cell, row) => setText(cell, String(row.num_output_tokens))],
    ["td", "number", (cell, row) => setText(cell, age(row.age))],
  ]);
  fill("queue", state.waiting, ownRequestId, [
    ["th", "request", requestCell],
    ["td", "number", (cell, row) => setText(cell, String(row.priority))],
    ["td", "number", (cell, row) => setText(cell, String(row.num_prompt_tokens))],
    ["td", "number", (cell, row) => setText(cell, age(row.age))],
  ]);
  setText(document.getElementById("num-waiting"), String(state.num_waiting));
  const more = document.getElementById("queue-more");
  more.hidden = state.num_waiting <= state.waiting.length;
  setText(more, `and ${state.num_waiting - state.waiting.length} more`);
}

function fill(id, rows, ownRequestId, columns) {
  const body = document.querySelector(`#${id} tbody`);
  while (body.rows.length > rows.length) body.lastElementChild.remove();
  while (body.rows.length < rows.length) body.append(newRow(columns));
  rows.forEach((row, index) => {
    const tr = body.rows[index];
    tr.dataset.phase = row.phase;
    tr.className = row.request_id === ownRequestId ? "own" : "";
    columns.forEach(([, , show], column) => show(tr.cells[column], row));
  });
  document.getElementById(`${id}-empty`).hidden = rows.length > 0;
}

function newRow(columns) {
  const tr = document.createElement("tr");
  for (const [name, style] of columns) {
    const cell = tr.appendChild(document.createElement(name));
    cell.className = style;
    if (name === "th") cell.scope = "row";
    if (style === "prompt") cell.append(document.createElement("span"), document.createElement("progress"));
    if (style === "request") {
      const line = cell.appendChild(document.createElement("div"));
      line.append(document.createElement("span"), document.createElement("span"));
    }
  }
  return tr;
}

function showRequest(cell, row, isOwn) {
  const [name, marks] = cell.firstChild.children;
  const sample = row.sample && ` ${row.sample}`;
  const preempted = row.num_preemptions ? `, preempted ${row.num_preemptions}×` : "";
  setText(name, isOwn ? "yours" : row.request_id);
  setText(marks, sample + preempted);
  cell.title = row.request_id + sample;
}

function promptCell(cell, row) {
  const [text, bar] = cell.children;
  bar.max = row.num_prompt_tokens;
  bar.value = row.num_prompt_tokens_computed;
  bar.setAttribute("aria-label", "Prompt computed");
  setText(text, `${row.num_prompt_tokens_computed} / ${row.num_prompt_tokens}`);
}

function age(seconds) {
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
}

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}
