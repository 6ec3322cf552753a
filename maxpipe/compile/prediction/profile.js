for (const lanes of document.querySelectorAll(".lanes")) {
  const wide = lanes.querySelector(".wide");
  lanes.previousElementSibling.querySelector("input").addEventListener("input", (event) => {
    wide.style.width = 100 * 2 ** event.target.value + "%";
  });
  wide.addEventListener("pointermove", (event) => {
    const box = event.target.closest("[data-t]");
    if (box) show(event, box.dataset.t);
    else tip.style.display = "none";
  });
  wide.addEventListener("pointerleave", () => tip.style.display = "none");
}
