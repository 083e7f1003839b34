"use strict";
const tip = document.getElementById("tip");
const all = (selector, within = document) => [...within.querySelectorAll(selector)];

// What is said of a box: where the pointer or the focus is.
function show(target, x, y) {
  const said = target?.dataset?.tip;
  tip.hidden = !said;
  if (!said) return;
  tip.textContent = said;
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(x + 14, innerWidth - width - 4)) + "px";
  tip.style.top = (y + 18 + height > innerHeight ? y - height - 10 : y + 18) + "px";
}
document.addEventListener("pointermove", (event) => show(event.target.closest?.("[data-tip]"), event.clientX, event.clientY));
document.addEventListener("pointerdown", (event) => show(event.target.closest?.("[data-tip]"), event.clientX, event.clientY));
document.addEventListener("focusin", (event) => {
  if (!event.target.matches?.(".box:focus-visible")) return;
  const { left, bottom } = event.target.getBoundingClientRect();
  show(event.target, Math.max(left, 0), bottom - 14);
});
document.addEventListener("focusout", () => { tip.hidden = true; });
document.addEventListener("scroll", () => { tip.hidden = true; }, true);

// Arrow keys go from box to box; only one of a row is reached by Tab.
document.addEventListener("keydown", (event) => {
  const box = event.target.closest?.(".box");
  const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (event.key === "Escape") tip.hidden = true;
  if (!box || !by) return;
  const row = all(".box", box.closest(".row"));
  const next = row[row.indexOf(box) + by];
  if (!next) return;
  event.preventDefault();
  box.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
});

// One time axis: what is scrolled in one chart is scrolled in all.
const boxes = all(".scroll");
for (const box of boxes)
  box.addEventListener("scroll", () => { for (const other of boxes) if (other.scrollLeft !== box.scrollLeft) other.scrollLeft = box.scrollLeft; });

// What is written in a box, where there is room for it; thin ones have no edge, which would cover them.
function write() {
  for (const chart of all(".chart")) {
    const width = chart.getBoundingClientRect().width / 100;
    for (const box of all(".box", chart)) box.classList.toggle("thin", width * box.dataset.share < 4);
    for (const text of all("text", chart)) text.classList.toggle("tight", width * text.dataset.share < 7.5 * text.textContent.length + 2);
  }
}
write();
addEventListener("resize", write);

// A long step, as wide as the screen.
const fit = document.getElementById("fit");
fit?.addEventListener("click", () => {
  fit.setAttribute("aria-pressed", String(document.body.classList.toggle("fit")));
  write();
});

// A module's lines.
for (const button of all("[data-path]"))
  button.addEventListener("click", (event) => {
    event.preventDefault(); // not the fold that it is in
    const path = button.dataset.path, off = button.getAttribute("aria-pressed") === "true";
    for (const other of all("[data-path]")) other.setAttribute("aria-pressed", String(!off && other === button));
    let first = null;
    for (const line of all("[data-modules]")) {
      const within = (module) => path === "" || module === path || module.startsWith(path + ".");
      const lit = !off && JSON.parse(line.dataset.modules).some(within);
      line.classList.toggle("lit", lit);
      if (lit) { first ??= line; line.closest("details").open = true; }
    }
    first?.scrollIntoView({ block: "nearest" });
  });
