// A word on every mark: by pointing at it, or with the arrow keys in a chart that has the focus.
(() => {
  const tip = document.createElement("div");
  tip.id = "tip";
  tip.hidden = true;
  tip.setAttribute("role", "status");
  document.body.append(tip);
  let told = null;

  function place(x, y) {
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(x + 12, innerWidth - box.width - 4))}px`;
    tip.style.top = `${y + 16 + box.height > innerHeight ? Math.max(4, y - box.height - 12) : y + 16}px`;
  }

  function tell(mark, x, y) {
    if (told) told.classList.remove("told");
    told = mark;
    tip.hidden = !mark;
    if (!mark) return;
    mark.classList.add("told");
    tip.textContent = mark.getAttribute("aria-label");
    const box = mark.getBoundingClientRect();
    place(x ?? box.left + box.width / 2, y ?? box.top + box.height / 2);
  }

  for (const title of document.querySelectorAll(".mark > title")) title.remove(); // or the browser shows its own too
  document.addEventListener("pointerover", (event) => {
    const mark = event.target.closest?.(".mark");
    tell(mark ?? null, event.clientX, event.clientY);
  });
  document.addEventListener("pointermove", (event) => { if (told) place(event.clientX, event.clientY); });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") tell(null); });

  for (const chart of document.querySelectorAll(".chart")) {
    const marks = [...chart.querySelectorAll(".mark")];
    let at = -1;
    chart.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (!step || !marks.length) return;
      event.preventDefault();
      at = at < 0 ? (step > 0 ? 0 : marks.length - 1) : (at + step + marks.length) % marks.length;
      marks[at].scrollIntoView({ block: "nearest", inline: "nearest" });
      tell(marks[at]);
    });
    chart.addEventListener("blur", () => tell(null));
  }

  let opened = [];
  addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("details:not([open]):not(.data)")];
    for (const each of opened) each.open = true;
  });
  addEventListener("afterprint", () => { for (const each of opened) each.open = false; });
})();
