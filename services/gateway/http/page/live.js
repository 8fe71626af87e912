export class LiveView { constructor(root) {} show() {} recolour() {} }
