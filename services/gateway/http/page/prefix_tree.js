// The tree of known prefixes, from blocks and their parents: unbranched runs are one segment.

// Returns {segments, rows, depth, numMore}. A segment is {ids, depth, row, parentRow, hits}: `depth` counts the blocks
// before it, `parentRow` is -1 for a root. A row is {hits, end}: the hits of its first segment, and the depth of its
// end. What is hit most comes first; at most `maxRows` rows.
export function prefixTree(blocks, maxRows) {
  const children = new Map();
  const roots = [];
  for (let id = 1; id <= blocks.size; id++) {
    if (!blocks.named[id]) continue;
    const parent = blocks.parent[id];
    if (parent > 0 && blocks.named[parent]) {
      if (children.has(parent)) children.get(parent).push(id);
      else children.set(parent, [id]);
    } else {
      roots.push(id);
    }
  }
  const weights = weigh(roots, children, blocks);
  const byWeight = (a, b) => weights[b] - weights[a] || a - b;
  const segments = [];
  const rows = [];
  let depth = 0;
  let numMore = 0;
  // Depth first, without recursion: chains are long.
  const open = roots.sort(byWeight).reverse().map((id) => ({ id, depth: 0, parentRow: -1, first: true }));
  while (open.length) {
    const { id, depth: start, parentRow, first } = open.pop();
    if (rows.length >= maxRows && (first === true || first.taken)) {
      numMore += 1;
      continue;
    }
    const ids = [id];
    let next = children.get(id) ?? [];
    while (next.length === 1 && blocks.hits[next[0]] === blocks.hits[ids.at(-1)] && blocks.refCnt[next[0]] === blocks.refCnt[ids.at(-1)]) {
      ids.push(next[0]);
      next = children.get(next[0]) ?? [];
    }
    // A first child goes on in its parent's row.
    const goesOn = first !== true && !first.taken;
    if (goesOn) first.taken = true;
    const hits = blocks.hits[id];
    const row = goesOn ? parentRow : rows.push({ hits, end: 0 }) - 1;
    segments.push({ ids, depth: start, row, parentRow: first === true ? -1 : parentRow, hits });
    rows[row].end = start + ids.length;
    depth = Math.max(depth, rows[row].end);
    const place = { taken: false };
    for (const child of next.sort(byWeight).reverse()) {
      open.push({ id: child, depth: start + ids.length, parentRow: row, first: place });
    }
  }
  return { segments, rows, depth, numMore };
}

// What speaks for a block: the hits below it, and who holds it.
function weigh(roots, children, blocks) {
  const weights = new Float64Array(blocks.size + 1);
  const order = [...roots];
  for (let i = 0; i < order.length; i++) order.push(...(children.get(order[i]) ?? []));
  const parentOf = (id) => blocks.parent[id];
  for (let i = order.length - 1; i >= 0; i--) {
    const id = order[i];
    weights[id] += blocks.hits[id] * 1000 + blocks.refCnt[id] * 10 + 1;
    if (parentOf(id) > 0 && blocks.named[parentOf(id)]) weights[parentOf(id)] += weights[id];
  }
  return weights;
}
