// What scrolls by itself can be reached with the keyboard, and what folds the menu has a name.
function reachable() {
  for (const box of document.querySelectorAll("div.math, div.cell_output, p:has(> img)"))
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
}
addEventListener("resize", reachable);
addEventListener("load", async () => {
  for (const arrow of document.querySelectorAll("summary > .toctree-toggle"))
    arrow.parentElement.ariaLabel = "Show or hide the pages below";
  await window.MathJax?.startup?.promise;
  reachable();
});
