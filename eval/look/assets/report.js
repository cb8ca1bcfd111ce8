"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const panel = document.getElementById("tree");
  const about = panel.querySelector(".about");
  const drawing = panel.querySelector(".drawing");
  const form = document.querySelector("form.filters");
  const blocks = [...document.querySelectorAll(".tokens")];
  const numbers = new Map(blocks.map((block, i) => [block, i]));
  const ROW = 22, HIGH = 18, GAP = 34, LETTER = 7.6, PAD = 6;
  let pinned = null, shown = null;

  // --- filters -------------------------------------------------------------------------------------------------

  function filter() {
    const want = name => form.elements[name].value;
    let count = 0;
    for (const section of document.querySelectorAll(".question")) {
      const fits = want("category") === "" || section.dataset.category === want("category");
      let any = false;
      for (const article of section.querySelectorAll("article")) {
        article.hidden = !fits || ["drafter", "temperature"].some(n => want(n) !== "" && article.dataset[n] !== want(n));
        any = any || !article.hidden;
        count += !article.hidden;
      }
      section.hidden = !any;
    }
    document.body.classList.toggle("marks", form.elements.marks.checked);
    form.querySelector("output").textContent = `${count} of ${blocks.length} answers`;
    hide();
  }

  // --- a pass as a tree ------------------------------------------------------------------------------------------

  // Nodes of a pass in drawing order: the confirmed token, the drafts, and the token that the target added.
  function nodesOf(answer, number) {
    const [tokens, parents, path, kept] = answer.passes[number];
    let before = 0;  // the output token that the pass starts from
    for (let i = 0; i < number; i++) before += answer.passes[i][3];
    const on = new Map(path.map((node, depth) => [node, depth]));
    const label = i => data.labels[i];
    const root = {label: label(answer.out[before]), kind: "root", children: [], depth: 0, at: 0};
    const nodes = [root];
    const drafts = tokens.map((token, i) => {
      const depth = on.get(i);
      const kind = depth === undefined ? "no" : depth < kept ? "yes" : "yes late";
      return {label: label(token), kind, children: [], at: depth === undefined ? 0 : depth + 1};
    });
    drafts.forEach((node, i) => {
      const parent = parents === 0 ? i - 1 : parents[i];
      node.parent = parent < 0 ? root : drafts[parent];
      node.depth = node.parent.depth + 1;
      node.parent.children.push(node);
      nodes.push(node);
    });
    if (kept > path.length) {
      const end = path.length ? drafts[path[path.length - 1]] : root;
      const whole = end.children.length ? "" : " whole";
      const own = {label: label(answer.out[before + kept]), kind: "last" + whole, children: [], parent: end,
        depth: end.depth + 1, at: path.length + 1};
      end.children.push(own);
      nodes.push(own);
    }
    return nodes;
  }

  // Levels from left to right; leaves below each other, a parent half-way between its first and last child. A leaf has
  // its row to itself and may reach below the next level; only nodes with children push that to the right.
  function place(nodes) {
    const widths = [];
    for (const node of nodes) {
      node.text = show(node.label);
      node.width = Math.max(wide(node.text), 1) * LETTER + 2 * PAD;
      widths[node.depth] = Math.max(widths[node.depth] || 0, node.children.length ? node.width : 0);
    }
    const lefts = [1];
    widths.forEach((width, depth) => { lefts[depth + 1] = lefts[depth] + width + GAP; });
    let row = 0;
    (function down(node) {
      node.x = lefts[node.depth];
      node.children.forEach(down);
      const [first, last] = [node.children[0], node.children[node.children.length - 1]];
      node.y = first ? (first.y + last.y) / 2 : 2 + ROW * row++;
    })(nodes[0]);
    return [Math.max(...nodes.map(node => node.x + node.width)) + 2, 2 + ROW * row];
  }

  function show(text) {
    return text.replace(/ /g, "\u2423").replace(/\n/g, "\u21b5").replace(/\t/g, "\u21e5");
  }

  function wide(text) {  // letters of East Asian scripts and emoji take two cells
    let cells = 0;
    for (const letter of text) cells += /[\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff00-\uff60\u{1f000}-\u{3ffff}]/u.test(letter) ? 2 : 1;
    return cells;
  }

  function element(name, attributes, parent) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    parent.append(made);
    return made;
  }

  function draw(answer, number, at) {
    const nodes = nodesOf(answer, number);
    const [width, height] = place(nodes);
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    for (const [key, value] of [["width", width], ["height", height], ["role", "img"]]) svg.setAttribute(key, value);
    svg.setAttribute("aria-label", inWords(nodes));
    const told = {no: "not accepted", yes: "accepted", "yes late": "accepted, but after the end",
      last: "the target's own after a rejection", "last whole": "bonus after a wholly accepted path"};
    // The others first, so that no line of theirs crosses those of the accepted path.
    const sorted = [...nodes].sort((a, b) => (a.kind === "no" ? 0 : 1) - (b.kind === "no" ? 0 : 1));
    let focus = null;
    for (const node of sorted) {
      const current = node.kind !== "no" && node.at === at;
      const group = element("g", {class: node.kind + (current ? " this" : "")}, svg);
      element("title", {}, group).textContent = node.parent ? `${node.label}: ${told[node.kind]}` : `${node.label}: confirmed before`;
      const y = node.y + HIGH / 2;
      if (node.parent) {
        const from = node.parent.x + node.parent.width, start = node.parent.y + HIGH / 2, middle = node.x - GAP / 2;
        element("path", {d: `M${from} ${start} H${middle - 8} C${middle} ${start} ${middle - 8} ${y} ${middle} ${y} H${node.x}`}, group);
      }
      element("rect", {x: node.x, y: node.y, width: node.width, height: HIGH, rx: 4}, group);
      element("text", {x: node.x + PAD, y: node.y + 13}, group).textContent = node.text;
      if (current) focus = node;
    }
    drawing.replaceChildren(svg);
    // To the root, where a tree is read from; with the token in view where both fit.
    const root = nodes[0], both = focus && Math.abs(focus.y - root.y) + 2 * ROW < drawing.clientHeight;
    drawing.scrollTop = (both ? (focus.y + root.y) / 2 : root.y) + HIGH / 2 - drawing.clientHeight / 2;
    drawing.scrollLeft = 0;
  }

  function inWords(nodes) {
    const path = nodes.filter(node => node.kind.startsWith("yes")).map(node => node.label);
    const drafts = nodes.filter(node => node.parent && !node.kind.startsWith("last")).length;
    return `${drafts} drafts, accepted: ${path.length ? path.join(" / ") : "none"}`;
  }

  // --- which token -------------------------------------------------------------------------------------------------

  function words(token) {  // the browser's own tooltip would hide the tree
    if (token.title) {
      token.setAttribute("aria-label", token.title);
      token.removeAttribute("title");
    }
    return token.getAttribute("aria-label");
  }

  function mates(token) {
    const number = token.dataset.r;
    return number === undefined ? [] : token.parentElement.querySelectorAll(`[data-r="${number}"]`);
  }

  function open(token) {
    if (shown === token) return;
    close();
    shown = token;
    about.textContent = words(token);
    panel.hidden = false;
    const box = token.getBoundingClientRect(), below = window.innerHeight - box.bottom;
    const low = below > box.top;  // where there is more room, so that the token stays in view
    drawing.style.maxHeight = `${Math.max(low ? below : box.top, 140) - 70}px`;
    panel.classList.toggle("low", low);
    panel.classList.toggle("high", !low);
    token.classList.add("on");
    const number = token.dataset.r;
    const answer = data.answers[numbers.get(token.parentElement)];
    const drafted = number !== undefined && answer.passes[number][0].length;
    drawing.hidden = !drafted;
    const together = [...mates(token)];
    together.forEach(mate => mate.classList.add("mate"));
    if (drafted) draw(answer, Number(number), together.indexOf(token) + 1);
  }

  function close() {
    if (!shown) return;
    shown.classList.remove("on");
    mates(shown).forEach(mate => mate.classList.remove("mate"));
    shown = null;
    panel.hidden = true;
  }

  function hide() {
    pinned = null;
    close();
  }

  function move(token, key) {
    const all = [...token.parentElement.querySelectorAll(".t")];
    const i = all.indexOf(token);
    const steps = {ArrowRight: i + 1, ArrowLeft: i - 1, Home: 0, End: all.length - 1};
    const pass = other => other.dataset.r;
    if (key === "ArrowDown") steps.ArrowDown = all.findIndex((other, j) => j > i && pass(other) !== pass(token));
    if (key === "ArrowUp") steps.ArrowUp = all.findLastIndex((other, j) => j < i && pass(other) !== pass(token));
    const next = all[steps[key]];
    if (!next) return;
    token.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }

  const tokenOf = event => event.target.closest ? event.target.closest(".tokens .t") : null;
  document.addEventListener("pointerover", event => {
    const token = tokenOf(event);
    if (token && !pinned) open(token);
    else if (!token && !pinned && !panel.contains(event.target)) close();
  });
  document.addEventListener("focusin", event => {
    const token = tokenOf(event);
    if (token) { pinned = null; open(token); }
  });
  document.addEventListener("focusout", event => {
    if (tokenOf(event) && !pinned && !panel.contains(event.relatedTarget)) close();
  });
  document.addEventListener("click", event => {
    const token = tokenOf(event);
    if (token) {
      const again = pinned === token;
      hide();
      if (!again) { open(token); pinned = token; }
    } else if (!panel.contains(event.target)) hide();
  });
  document.addEventListener("keydown", event => {
    if (event.key === "Escape") return hide();
    const token = tokenOf(event);
    if (!token) return;
    if (event.key === "Enter") { pinned = null; open(token); pinned = token; }
    else if (/^(Arrow(Left|Right|Up|Down)|Home|End)$/.test(event.key)) { event.preventDefault(); move(token, event.key); }
  });
  for (const block of blocks) if (block.firstElementChild) block.firstElementChild.tabIndex = 0;
  form.addEventListener("change", filter);
  form.addEventListener("submit", event => event.preventDefault());
  form.hidden = false;
  filter();
})();
