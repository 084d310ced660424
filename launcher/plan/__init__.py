"""Pure: configuration and host facts in, everything that will be done out. Nothing here touches the machine."""
